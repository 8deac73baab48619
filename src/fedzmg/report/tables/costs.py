"""Tables of traffic, time, hyper-parameters and environment of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedzmg.report.tables.table import Cell, Record, Table
from fedzmg.results.formatting import bytes_text, setting_text
from fedzmg.results.runs import Run
from fedzmg.results.study_result import StudyResult

_RATES = ("client.lr", "server.lr")
_FACTS = (
    "fedzmg", "commit", "dirty", "python", "torch", "numpy", "platform", "device", "device_name",
    "threads", "dtype", "precision", "engine", "clients", "examples", "data_sha256", "task_sha256",
)  # fmt: skip
_FACT_NAMES = {
    "dirty": "uncommitted changes",
    "data_sha256": "SHA-256 of the data",
    "task_sha256": "SHA-256 of the task",
}


def traffic(result: StudyResult) -> Table:
    """Make the table of bytes and seconds of one run."""
    heads = (
        "algorithm", "arrays down", "arrays up", "up, packed", "scalars", "kept per client",
        "total", "seconds",
    )  # fmt: skip
    rows = []
    records: list[Record] = []
    for score in result.scores:
        moved = score.traffic
        sizes = {
            "down": moved["bytes_down"],
            "up": moved["bytes_up"],
            "up_packed": moved["bytes_up_bound"],
            "scalars": moved["scalar_bytes_down"] + moved["scalar_bytes_up"],
            "kept": moved["kept"],
            "total": moved["total"],
        }
        cells = [Cell(bytes_text(size), size) for size in sizes.values()]
        rows.append([Cell(score.label), *cells, Cell(f"{score.seconds:,.1f}", score.seconds)])
        records.append({"algorithm": score.label, "seconds": score.seconds, **sizes})
    caption = (
        "Mean over runs, all rounds and clients; packed: if whole numbers used no more bits than "
        "they need; seconds: training time of a run's share of its pack."
    )
    title = f"Traffic of one run on {result.study.name}"
    return Table("traffic", title, heads, rows, caption, records)


def settings(result: StudyResult) -> Table:
    """Make the table of the hyper-parameters that were used."""
    used = {label: runs[0].variant for label, runs in result.study.members.items()}
    keys = sorted({key for options in used.values() for key in options}, key=_order)
    rates = [key for key in keys if key in _RATES]
    others = [key for key in keys if key not in _RATES]
    rows = []
    for label, options in used.items():
        named = [f"{key} {setting_text(options[key])}" for key in others if key in options]
        cells = [Cell(setting_text(options.get(key)), options.get(key)) for key in rates]
        rows.append([Cell(label), *cells, Cell(", ".join(named), None, "words")])
    records: list[Record] = [
        {"algorithm": label, **{key: options.get(key) for key in keys}}
        for label, options in used.items()
    ]
    caption = "Every default is written out; what is not named is off."
    heads = ("algorithm", *rates, "others")
    title = f"Hyper-parameters used on {result.study.name}"
    return Table("settings", title, heads, rows, caption, records)


def _order(key: str) -> tuple[int, bool, str]:
    table = key.partition(".")[0]
    return {"client": 0, "server": 1}.get(table, 2), not key.endswith(".lr"), key


def circumstances(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """List versions, machine, commit and data with all values they had."""
    found = []
    for fact in _FACTS:
        values = [run.manifest[fact] for run in runs if run.manifest.get(fact) is not None]
        if values:
            texts = dict.fromkeys(map(_fact, values))
            found.append((_FACT_NAMES.get(fact, fact.replace("_", " ")), ", ".join(texts)))
    started = sorted(str(r.manifest["started"]) for r in runs if r.manifest.get("started"))
    spent = sum(run.log.seconds for run in runs)
    if spent:
        found.append(("time of all rounds", f"{spent:,.0f} s"))
    if started:
        found.append(("started", " to ".join(dict.fromkeys((started[0], started[-1])))))
    return found


def _fact(value: Any) -> str:
    plain = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if plain else setting_text(value)
