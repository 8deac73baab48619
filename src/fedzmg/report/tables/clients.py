"""Tables of single clients: their models and unusual uploads, and devices of deployed runs."""

import contextlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.evaluation import OverClients
from fedzmg.report.tables.table import NOTHING, Cell, Column, Table, words
from fedzmg.results import formatting as fmt
from fedzmg.results.scores import evaluated_runs, over_seeds
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.formats import read_json

_OVER_CLIENTS = {
    "mean": "mean", "sd": "deviation", "median": "median", "worst_tenth": "worst 10 %",
    "best_tenth": "best 10 %",
}  # fmt: skip
_SHORT = "share_short_of_threshold"
_MODELS = {"metric": "common model", "personal": "own model", "tuned": "fine-tuned"}
_VALUES = ("mean", "worst_tenth", "sd")
MOST_ROWS, MOST_ROUNDS = 50, 8  # clients with unusual uploads, and rounds of each, that are named
_UPLOADS = (
    "Uploads that are not finite are rejected. An update whose norm is above 100 times the "
    "median of its cohort is flagged, or rejected with federation.guard = true; largest: that "
    "norm over the median, of flagged updates if there are any."
)
_DEVICES = (
    "rounds: answers that were used; absent: rounds without an answer in time; late: answers "
    "after the deadline; refused: answers that were wrong; lost: answers without the client's "
    "memory; seconds: of the last local training."
)
_HEADS = {"name": "device", "last_seen": "last seen (UTC)", "reason": "last refusal"}
_COUNTS = ("seed", "client", "examples", "rounds", "absent", "late", "refused", "lost", "seconds")


def clients(result: StudyResult) -> Table | None:
    """Make the table of the metric over clients; None if no run evaluated them one by one."""
    study, higher = result.study, result.study.higher_is_better
    found, heads, goal = evaluated_runs(study), dict(_OVER_CLIENTS), study.threshold
    if goal is not None:
        side = "below" if higher else "above"
        heads[_SHORT] = f"clients {side} {fmt.goal_text(goal, study.metric)}"
    records: list[dict[str, Any]] = []
    for label, runs in found.items():
        for run in runs:
            values = run.clients[-1].metric
            spread = OverClients.of(values, higher_is_better=higher)._asdict()
            record = {"algorithm": label, "seed": run.seed, "clients": float(len(values)), **spread}
            if goal is not None:
                reached = values >= goal if higher else values <= goal
                record[_SHORT] = float((~reached).mean())
            records.append(record)
    if not records:
        return None
    rows = [[Cell(label)] for label in found]
    for name in heads:
        metric = "accuracy" if name == _SHORT else study.metric
        best = None if name == "sd" else min if name == _SHORT or not higher else max
        _add_column(rows, over_seeds(records, found, name), metric, best)
    several = max(map(len, found.values())) > 1
    last = next(run.clients[-1] for runs in found.values() for run in runs)
    number, total = len(last.examples), last.population
    drawn = "all that have any" if number == total else "drawn by chance, the same for every run"
    caption = (
        f"The model after the last round on each client's own {last.part} examples; {number:,} of "
        f"{total:,} clients, {drawn}. Every client counts once; deviation: over clients; worst and "
        f"best 10 %: mean of that tenth{'; ± standard deviation over seeds' * several}."
    )
    title = f"{study.metric.capitalize()} over clients on {study.name}"
    return Table("clients", title, ("algorithm", *heads.values()), rows, caption, records)


def own_models(result: StudyResult) -> Table | None:
    """Make the table of clients' own models; None if there are none, nor fine-tuned ones."""
    study, found = result.study, evaluated_runs(result.study)
    lasts = [run.clients[-1] for runs in found.values() for run in runs]
    kinds = [k for k in _MODELS if any(getattr(one, k) is not None for one in lasts)]
    if kinds in ([], ["metric"]):
        return None
    records: list[dict[str, Any]] = []
    for label, runs in found.items():
        for run in runs:
            record: dict[str, Any] = {"algorithm": label, "seed": run.seed}
            one = run.clients[-1]
            for kind in kinds:
                # The common model in place of one that a run lacks.
                values = one.metric if getattr(one, kind) is None else getattr(one, kind)
                spread = OverClients.of(values, higher_is_better=study.higher_is_better)
                record |= {f"{kind}_{name}": getattr(spread, name) for name in _VALUES}
            records.append(record)
    rows, heads = [[Cell(label)] for label in found], ["algorithm"]
    for kind in kinds:
        name = _MODELS[kind]
        texts = {"mean": name, "worst_tenth": f"{name}, worst 10 %", "sd": f"{name}, deviation"}
        # The table of clients describes the common model further.
        for value in _VALUES[:1] if kind == "metric" else _VALUES:
            heads.append(texts[value])
            best = None if value == "sd" else max if study.higher_is_better else min
            spreads = over_seeds(records, found, f"{kind}_{value}")
            if value != "mean":
                spreads = [(mean, None) for mean, _ in spreads]
            _add_column(rows, spreads, study.metric, best)
    epochs = int(study.protocol.get("fine_tune") or 0)
    tuned = f" Fine-tuned: after {fmt.count_text(epochs, 'epoch')} of SGD on the client's training "
    tuned += "examples at the client learning rate, on a copy."
    caption = f"Each client's own {lasts[0].part} examples after the last round. Own "
    caption += "model: the personal model of the algorithm, or the common one if it has none."
    caption += tuned * ("tuned" in kinds and epochs > 0)
    title = f"Clients' own models on {study.name}"
    return Table("own_models", title, tuple(heads), rows, caption, records)


def _add_column(
    rows: Sequence[list[Cell]], spreads: Sequence[tuple[float | None, float | None]], metric: str,
    best: Any,
) -> None:  # fmt: skip
    """Add means over seeds by algorithm, with their deviation; mark the best, if asked for."""
    finite = [mean for mean, _ in spreads if mean is not None and math.isfinite(mean)]
    top = best(finite) if best is not None and len(finite) > 1 else None
    for row, (mean, sd) in zip(rows, spreads, strict=True):
        text = fmt.spread_text(mean, sd, metric)
        row.append(NOTHING if mean is None else Cell(text, mean, "best" * (mean == top)))


def uploads(result: StudyResult) -> Table | None:
    """Make the table of unusual uploads, flagged ones first; None if there are none."""
    members = result.study.members.items()
    items = [(label, r.seed, one) for label, runs in members for r in runs for one in r.unusual]
    if not items:
        return None
    items.sort(key=lambda item: (not item[2].flagged, -item[2].ratio))

    def rounds(item: Any) -> Cell:
        shown = ", ".join(f"{round_:,}" for round_ in item[2].rounds[:MOST_ROUNDS])
        left = len(item[2].rounds) - MOST_ROUNDS
        return words(f"{shown} and {left:,} more" if left > 0 else shown)

    def largest(item: Any) -> Cell:
        ratio = item[2].ratio
        return Cell(f"{ratio:.2g}" if math.isfinite(ratio) else "not finite", ratio)

    columns = [
        Column("algorithm", "algorithm", itemgetter(0)),
        Column("client", "client", lambda item: item[2].name),
        Column("seed", "seed", itemgetter(1)),
        Column("rejected", "rejected", lambda item: item[2].rejected),
        Column("flagged", "flagged", lambda item: item[2].flagged),
        Column("largest", "largest", largest),
        Column("rounds", "", rounds),
        Column("", "first_round", lambda item: item[2].rounds[0]),
        Column("", "rounds", lambda item: len(item[2].rounds)),
    ]
    cut = f" The first {MOST_ROWS} of {len(items):,} rows." * (len(items) > MOST_ROWS)
    title, shown = f"Unusual uploads on {result.study.name}", items[:MOST_ROWS]
    return Table.build("uploads", title, columns, shown, _UPLOADS + cut, words=2)


def devices(result: StudyResult) -> Table | None:
    """Make the table of devices and their health; None if no run was deployed."""
    items: list[dict[str, Any]] = []
    for label, runs in result.study.members.items():
        for run in runs:
            path = Path(run.path) / "nodes.json"
            with contextlib.suppress(InputError, KeyError, TypeError):
                for node in read_json(path)["nodes"] if run.path and path.is_file() else []:
                    seen = f"{datetime.fromtimestamp(node['last_seen'], UTC):%Y-%m-%d %H:%M:%S}"
                    shown = {"last_seen": seen, "seconds": round(node["seconds"], 2)}
                    items.append({**node, **shown, "algorithm": label, "seed": run.seed})
    if not items:
        return None
    keys = ("algorithm", *_HEADS, *_COUNTS)
    columns = [Column(_HEADS.get(key, key), key, itemgetter(key)) for key in keys]
    title = f"Devices of the federation on {result.study.name}"
    return Table.build("devices", title, columns, items, _DEVICES, words=4)
