"""The table of single clients: how evenly an algorithm serves them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedzmg.evaluation import OverClients, share_short_of
from fedzmg.report.tables.sheet import NOTHING, Cell, Record, Sheet
from fedzmg.results.formatting import goal_text, spread_text
from fedzmg.results.grouping import Study
from fedzmg.results.over_clients import seen
from fedzmg.results.study_result import StudyResult
from fedzmg.storage.client_metrics import ClientTable

_HEADS = {
    "mean": "mean",
    "sd": "deviation",
    "median": "median",
    "worst_tenth": "worst 10 %",
    "best_tenth": "best 10 %",
}
_RANKED = ("mean", "median", "worst_tenth", "best_tenth")
_SHORT = "share_short_of_threshold"


def clients(outcome: StudyResult) -> Sheet | None:
    """Mean, deviation, median, worst and best tenth over clients; None if no run looked at them."""
    study = outcome.study
    found = {label: seen(runs) for label, runs in study.members.items()}
    if not any(found.values()):
        return None
    columns = [*_HEADS, *([] if study.threshold is None else [_SHORT])]
    each = {
        label: [(seed, _numbers(study, one)) for seed, one in runs] for label, runs in found.items()
    }
    means = {
        label: {name: statistics.fmean(numbers[name] for _, numbers in runs) for name in columns}
        for label, runs in each.items()
        if runs
    }
    rows = []
    for label, runs in each.items():
        cells = [_cell(study, name, [n[name] for _, n in runs], means) for name in columns]
        rows.append([Cell(label), *cells])
    records: list[Record] = [
        {"algorithm": label, "seed": seed, **numbers}
        for label, runs in each.items()
        for seed, numbers in runs
    ]
    heads = ["algorithm", *_HEADS.values()]
    if study.threshold is not None:
        side = "below" if study.higher_is_better else "above"
        heads.append(f"clients {side} {goal_text(study.threshold, study.metric)}")
    title = f"{study.metric.capitalize()} over clients on {study.name}"
    return Sheet("clients", title, tuple(heads), rows, _caption(found), records)


def _numbers(study: Study, found: ClientTable) -> dict[str, float]:
    higher, values = study.higher_is_better, found.metric[-1]
    numbers = {
        "clients": float(len(values)),
        **OverClients.of(values, higher_is_better=higher)._asdict(),
    }
    if study.threshold is not None:
        numbers[_SHORT] = share_short_of(values, study.threshold, higher_is_better=higher)
    return numbers


def _cell(
    study: Study, name: str, values: Sequence[float], means: dict[str, dict[str, float]]
) -> Cell:
    if not values:
        return NOTHING
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    if name == _SHORT:
        text = f"{100 * mean:.1f}" + ("" if sd is None else f" ± {100 * sd:.1f}") + " %"
        best = min(one[name] for one in means.values())
    else:
        text = spread_text(mean, sd, study.metric)
        best = (max if study.higher_is_better else min)(one[name] for one in means.values())
    ranked = len(means) > 1 and (name in _RANKED or name == _SHORT)
    return Cell(text, mean, "best" if ranked and mean == best else "")


def _caption(found: dict[str, list[tuple[int, ClientTable]]]) -> str:
    one = next(runs[0][1] for runs in found.values() if runs)
    part = "test" if one.part == "test" else "training"
    number, total = len(one.examples), one.population
    who = f"all {total:,} clients that have any" if number == total else (
        f"{number:,} of {total:,} clients, drawn by chance and the same for every run"
    )  # fmt: skip
    runs = max(len(each) for each in found.values())
    seeds = "" if runs < 2 else "; ± standard deviation over seeds"
    return (
        f"The model after the last round on each client's own {part} examples, {who}. Every client "
        "counts once; deviation: standard deviation over clients; worst and best 10 %: mean of "
        f"that tenth of the clients{seeds}."
    )
