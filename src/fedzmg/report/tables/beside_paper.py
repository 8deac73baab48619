"""The table of the paper's printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fedzmg.report.tables.study import round_cell
from fedzmg.report.tables.table import NOTHING, Cell, Column, Table
from fedzmg.results import paper
from fedzmg.results.formatting import goal_text, signed_text, value_text
from fedzmg.results.reading import Study
from fedzmg.results.scores import arrivals, late_means
from fedzmg.results.study_result import StudyResult

_ACCURACY = "accuracy"
_goal = partial(goal_text, metric=_ACCURACY)
_Number = tuple[str, str, str, float | None, float | None]
"""Measure, algorithm, kind of number, ours and the printed one."""


def beside_paper(result: StudyResult) -> Table | None:
    """Make a row per printed number; None if the paper has none for this task."""
    study, dataset = result.study, paper.COUNTERPARTS.get(result.study.task)
    if dataset is None or study.metric != _ACCURACY:
        return None
    numbers = list(_numbers(result, dataset))
    columns = [
        Column("", "task", lambda _: study.name),
        Column("measure", "measure", lambda one: one[0]),
        Column("algorithm", "algorithm", lambda one: one[1]),
        Column("here", "here", lambda one: _cell(one[2], one[3])),
        Column("paper", "paper", lambda one: _cell(one[2], one[4])),
        Column("difference", "difference", lambda one: _cell(one[2], _gap(one), difference=True)),
    ]
    title, caption = f"{study.name} beside the paper's {dataset.title}", _caption(study, dataset)
    table = Table.build("paper", title, columns, numbers, " ".join(caption), words=2)
    return table if numbers else None


def _gap(number: _Number) -> float | None:
    *_, here, printed = number
    return None if here is None or printed is None else here - printed


def _numbers(result: StudyResult, dataset: paper.Dataset) -> Iterator[_Number]:
    study = result.study
    shown = {
        s.label: (s, dataset.scores[s.label]) for s in result.scores if s.label in dataset.scores
    }
    for i, level in enumerate(paper.THRESHOLDS):
        for label, (_, printed) in shown.items():
            reached = arrivals(study, study.members[label], level).averaged
            index = None if reached is None else reached - 1
            yield f"index at {_goal(level)}", label, "index", index, printed[i]
    # The paper's slowest is among its own algorithms, so others must not move the start.
    late, _ = late_means(study.only(shown), paper.THRESHOLDS[1]) if shown else ({}, "")
    for label, (_, printed) in shown.items():
        yield "late-stage mean", label, "share", late.get(label), printed[2]
    for label, (score, _) in shown.items():
        yield "final accuracy", label, "share", score.mean, None
    tested = dataset.tests if study.reference == paper.TESTED else {}
    for i, (measure, kind) in enumerate((("paired t", "t"), ("p, uncorrected", "p"))):
        for label in filter(tested.__contains__, shown):
            ours = getattr(shown[label][0].test, kind, None)
            yield measure, label, kind, ours, tested[label][i]


def _cell(kind: str, value: float | None, *, difference: bool = False) -> Cell:
    if value is None:
        return round_cell(None) if kind == "index" and not difference else NOTHING
    if kind == "share":
        text = value_text(value, _ACCURACY, signed=difference)
    elif kind == "t" or difference:
        text = signed_text(value, {"index": ",d", "t": ".3f", "p": ".3g"}[kind])
    else:
        text = f"{value:,}" if kind == "index" else f"{value:.4g}"
    return Cell(text, value)


def _caption(study: Study, dataset: paper.Dataset) -> Iterator[str]:
    low, high = map(_goal, paper.THRESHOLDS)
    if study.task in paper.STAND_INS:
        yield f"{study.task} only stands in for {dataset.title}, so the differences say little."
    yield (
        "The paper counts from 0: index 80 is round 81. Late stage: mean accuracy after the "
        f"slowest of these algorithms reached {high}. The paper's tables have {low} and {high} for "
        f"every data set; it prints no final accuracies. t and p: paired test of {paper.TESTED} "
        "minus the algorithm, not corrected, as in the paper. Difference: here minus paper."
    )
    other = [_goal(g) for g in dataset.text_thresholds if g not in paper.THRESHOLDS]
    if other:
        yield f"Its text names {' and '.join(other)} instead, for which it prints no numbers."
    differing = [
        f"{study.protocol[key]} {key} instead of {value}"
        for key, value in paper.PROTOCOL.items()
        if study.protocol.get(key, value) != value
    ]
    seeds = max(len(runs) for runs in study.members.values())
    if seeds != paper.SEEDS:
        differing.append(f"{seeds} seeds instead of {paper.SEEDS}")
    if differing:
        yield f"Other than in the paper: {', '.join(differing)}."
