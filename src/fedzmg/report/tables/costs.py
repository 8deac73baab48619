"""Tables of what a run took: traffic, time, settings and circumstances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.report.tables.sheet import Cell, Record, Sheet
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


def traffic(outcome: StudyResult) -> Sheet:
    """What moved in one run."""
    heads = (
        "algorithm", "arrays down", "arrays up", "up, packed", "scalars", "kept per client",
        "total", "seconds",
    )  # fmt: skip
    rows = []
    records: list[Record] = []
    for score in outcome.scores:
        found = score.traffic
        sizes = {
            "down": found["bytes_down"],
            "up": found["bytes_up"],
            "up_packed": found["bytes_up_bound"],
            "scalars": found["scalar_bytes_down"] + found["scalar_bytes_up"],
            "kept": found["kept"],
            "total": found["total"],
        }
        rows.append(
            [
                Cell(score.label),
                *(Cell(bytes_text(size), size) for size in sizes.values()),
                Cell(f"{score.seconds:,.1f}", score.seconds),
            ]
        )
        records.append({"algorithm": score.label, "seconds": score.seconds, **sizes})
    caption = (
        "Mean over runs, all rounds and clients; packed: if whole numbers used no more bits than "
        "they need; seconds: training time of a run's share of its pack."
    )
    title = f"Traffic of one run on {outcome.study.name}"
    return Sheet("traffic", title, heads, rows, caption, records)


def settings(outcome: StudyResult) -> Sheet:
    """Hyper-parameters that were actually used, one column each."""
    used = {label: runs[0].variant for label, runs in outcome.study.members.items()}
    keys = sorted({key for options in used.values() for key in options}, key=_order)
    rates = [key for key in keys if key in _RATES]
    rows = [
        [
            Cell(label),
            *(Cell(setting_text(options.get(key)), options.get(key)) for key in rates),
            Cell(_others(options, keys), None, "words"),
        ]
        for label, options in used.items()
    ]
    records: list[Record] = [
        {"algorithm": label, **{key: options.get(key) for key in keys}}
        for label, options in used.items()
    ]
    caption = "Every default is written out; what is not named is off."
    heads = ("algorithm", *rates, "others")
    title = f"Hyper-parameters used on {outcome.study.name}"
    return Sheet("settings", title, heads, rows, caption, records)


def _others(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    named = [key for key in keys if key in options and key not in _RATES]
    return ", ".join(f"{key} {setting_text(options[key])}" for key in named)


def _order(key: str) -> tuple[int, bool, str]:
    table = key.partition(".")[0]
    place = {"client": 0, "server": 1}.get(table, 2)
    return place, not key.endswith(".lr"), key


def circumstances(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Versions, machine, commit and data: every fact with all values it had."""
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
