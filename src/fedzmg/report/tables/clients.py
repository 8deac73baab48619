"""Tables of single clients: the common model, personal and fine-tuned ones."""

import math
from collections.abc import Sequence
from typing import Any

from fedzmg.evaluation import OverClients, share_short_of
from fedzmg.report.tables.table import NOTHING, Cell, Table
from fedzmg.results import formatting as fmt
from fedzmg.results.scores import client_tables, over_seeds
from fedzmg.results.study_result import StudyResult

_OVER_CLIENTS = {
    "mean": "mean", "sd": "deviation", "median": "median", "worst_tenth": "worst 10 %",
    "best_tenth": "best 10 %",
}  # fmt: skip
_SHORT = "share_short_of_threshold"
_MODELS = {"metric": "common model", "personal": "own model", "tuned": "fine-tuned"}
_VALUES = ("mean", "worst_tenth", "sd")


def clients(result: StudyResult) -> Table | None:
    """Make the table of the metric over clients; None if no run evaluated them one by one."""
    study, higher = result.study, result.study.higher_is_better
    found, heads, goal = client_tables(study), dict(_OVER_CLIENTS), study.threshold
    if goal is not None:
        side = "below" if higher else "above"
        heads[_SHORT] = f"clients {side} {fmt.goal_text(goal, study.metric)}"
    records: list[dict[str, Any]] = []
    for label, runs in found.items():
        for seed, one in runs.items():
            values = one.metric[-1]
            spread = OverClients.of(values, higher_is_better=higher)._asdict()
            record = {"algorithm": label, "seed": seed, "clients": float(len(values)), **spread}
            if goal is not None:
                record[_SHORT] = share_short_of(values, goal, higher_is_better=higher)
            records.append(record)
    if not records:
        return None
    rows = [[Cell(label)] for label in found]
    for name in heads:
        metric = "accuracy" if name == _SHORT else study.metric
        best = None if name == "sd" else min if name == _SHORT or not higher else max
        _add_column(rows, over_seeds(records, found, name), metric, best)
    several = max(map(len, found.values())) > 1
    one = next(table for runs in found.values() for table in runs.values())
    number, total = len(one.examples), one.population
    drawn = "all that have any" if number == total else "drawn by chance, the same for every run"
    caption = (
        f"The model after the last round on each client's own {one.part} examples; {number:,} of "
        f"{total:,} clients, {drawn}. Every client counts once; deviation: over clients; worst and "
        f"best 10 %: mean of that tenth{'; ± standard deviation over seeds' * several}."
    )
    title = f"{study.metric.capitalize()} over clients on {study.name}"
    return Table("clients", title, ("algorithm", *heads.values()), rows, caption, records)


def own_models(result: StudyResult) -> Table | None:
    """Make the table of clients' own models; None if there are none, nor fine-tuned ones."""
    study, found = result.study, client_tables(result.study)
    tables = [one for runs in found.values() for one in runs.values()]
    kinds = [k for k in _MODELS if any(getattr(one, k) is not None for one in tables)]
    if kinds in ([], ["metric"]):
        return None
    records: list[dict[str, Any]] = []
    for label, runs in found.items():
        for seed, one in runs.items():
            record: dict[str, Any] = {"algorithm": label, "seed": seed}
            for kind in kinds:
                # The common model in place of one that a run lacks.
                values = one.metric if getattr(one, kind) is None else getattr(one, kind)
                spread = OverClients.of(values[-1], higher_is_better=study.higher_is_better)
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
    caption = (
        "Each client's own examples after the last round; every client counts once. Own model: the "
        "personal model of the algorithm, or the common one if it has none."
        f"{tuned if 'tuned' in kinds and epochs else ''}"
    )
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
