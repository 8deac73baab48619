"""The table of single clients: fairness of every algorithm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedzmg.evaluation import OverClients, share_short_of
from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results.formatting import goal_text, spread_text
from fedzmg.results.grouping import Study
from fedzmg.results.over_clients import evaluated_clients
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.client_metrics import ClientTable

_HEADS = {
    "mean": "mean",
    "sd": "deviation",
    "median": "median",
    "worst_tenth": "worst 10 %",
    "best_tenth": "best 10 %",
}
_SHORT = "share_short_of_threshold"


def clients(result: StudyResult) -> Table | None:
    """Make the table of the metric over clients; None if no run evaluated them one by one."""
    study = result.study
    found = {label: evaluated_clients(runs) for label, runs in study.members.items()}
    if not any(found.values()):
        return None
    heads = dict(_HEADS)
    if study.threshold is not None:
        side = "below" if study.higher_is_better else "above"
        heads[_SHORT] = f"clients {side} {goal_text(study.threshold, study.metric)}"
    numbers = {
        label: [(seed, _numbers(study, one)) for seed, one in runs] for label, runs in found.items()
    }
    rows = [[Cell(label)] for label in numbers]
    for name in heads:
        columns = [[own[name] for _, own in runs] for runs in numbers.values()]
        means = [statistics.fmean(values) for values in columns if values]
        lowest = name == _SHORT or not study.higher_is_better
        best = (min if lowest else max)(means) if len(means) > 1 and name != "sd" else None
        for row, values in zip(rows, columns, strict=True):
            row.append(_cell(study, name, values, best))
    records: list[Record] = [
        {"algorithm": label, "seed": seed, **own}
        for label, runs in numbers.items()
        for seed, own in runs
    ]
    title = f"{study.metric.capitalize()} over clients on {study.name}"
    return Table(
        "clients", title, ("algorithm", *heads.values()), rows, _caption(found), records
    )  # fmt: skip


def _numbers(study: Study, found: ClientTable) -> dict[str, float]:
    higher, values = study.higher_is_better, found.metric[-1]
    spread = OverClients.of(values, higher_is_better=higher)._asdict()
    numbers = {"clients": float(len(values)), **spread}
    if study.threshold is not None:
        numbers[_SHORT] = share_short_of(values, study.threshold, higher_is_better=higher)
    return numbers


def _cell(study: Study, name: str, values: Sequence[float], best: float | None) -> Cell:
    if not values:
        return NOTHING
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    if name == _SHORT:
        text = f"{100 * mean:.1f}" + ("" if sd is None else f" ± {100 * sd:.1f}") + " %"
    else:
        text = spread_text(mean, sd, study.metric)
    return Cell(text, mean, "best" if mean == best else "")


def _caption(found: dict[str, list[tuple[int, ClientTable]]]) -> str:
    one = next(runs[0][1] for runs in found.values() if runs)
    part = "test" if one.part == "test" else "training"
    number, total = len(one.examples), one.population
    who = f"all {total:,} clients that have any" if number == total else (
        f"{number:,} of {total:,} clients, drawn by chance and the same for every run"
    )  # fmt: skip
    several = max(len(each) for each in found.values()) > 1
    return (
        f"The model after the last round on each client's own {part} examples, {who}. Every client "
        "counts once; deviation: standard deviation over clients; worst and best 10 %: mean of "
        f"that tenth of the clients{'; ± standard deviation over seeds' * several}."
    )
