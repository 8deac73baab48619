"""The table of the paper's printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fedzmg.report.tables.study import round_cell
from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results import paper
from fedzmg.results.averaging import arrivals, late_means
from fedzmg.results.formatting import goal_text, signed_text, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.study_result import StudyResult

_ACCURACY = "accuracy"
_goal = partial(goal_text, metric=_ACCURACY)


def beside_paper(result: StudyResult) -> Table | None:
    """Make a row per printed number; None if the paper has none for this task."""
    study, twin = result.study, paper.COUNTERPARTS.get(result.study.task)
    if twin is None or study.metric != _ACCURACY:
        return None
    rows = []
    records: list[Record] = []
    for measure, label, kind, here, printed in _numbers(result, twin.dataset):
        gap = None if here is None or printed is None else here - printed
        cells = (_cell(kind, here), _cell(kind, printed), _cell(kind, gap, difference=True))
        rows.append([Cell(measure), Cell(label), *cells])
        records.append({"task": study.name, "measure": measure, "algorithm": label, "here": here,
                        "paper": printed, "difference": gap})  # fmt: skip
    if not rows:
        return None
    heads = ("measure", "algorithm", "here", "paper", "difference")
    title = f"{study.name} beside the paper's {twin.dataset.title}"
    return Table("paper", title, heads, rows, " ".join(_caption(study, twin)), records, 2)


def _numbers(
    result: StudyResult, dataset: paper.Dataset
) -> Iterator[tuple[str, str, str, float | None, float | None]]:
    """Yield measure, algorithm, kind of number, ours and the printed one."""
    study, lines = result.study, dataset.lines
    shown = [score for score in result.scores if score.label in lines]
    for level, name in zip(paper.THRESHOLDS, ("to_low", "to_high"), strict=True):
        for score in shown:
            reached = arrivals(study, study.members[score.label], level).averaged
            index = None if reached is None else reached - 1
            yield (
                f"index at {_goal(level)}",
                score.label,
                "index",
                index,
                getattr(lines[score.label], name),
            )
    # The paper's slowest is among its own algorithms, so others must not move the start.
    late, _ = (
        late_means(study.only(s.label for s in shown), paper.THRESHOLDS[1]) if shown else ({}, "")
    )
    for score in shown:
        label = score.label
        yield "late-stage mean", label, "share", late.get(label), lines[label].late
    for score in shown:
        yield "final accuracy", score.label, "share", score.mean, None
    for measure, kind in (("paired t", "t"), ("p, uncorrected", "p")):
        for score in shown:
            if study.reference == paper.TESTED and score.label in dataset.tests:
                ours = None if score.test is None else getattr(score.test, kind)
                yield measure, score.label, kind, ours, getattr(dataset.tests[score.label], kind)


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


def _caption(study: Study, twin: paper.Counterpart) -> Iterator[str]:
    title, (low, high) = twin.dataset.title, map(_goal, paper.THRESHOLDS)
    if twin.stands_in:
        yield f"{study.task} only stands in for {title}, so the differences say little."
    yield (
        "The paper counts from 0: index 80 is round 81. Late stage: mean accuracy after the "
        f"slowest of these algorithms reached {high}. The paper's tables have {low} and {high} for "
        f"every data set; it prints no final accuracies. t and p: paired test of {paper.TESTED} "
        "minus the algorithm, not corrected, as in the paper. Difference: here minus paper."
    )
    other = [_goal(g) for g in twin.dataset.text_thresholds if g not in paper.THRESHOLDS]
    if other:
        yield f"Its text names {' and '.join(other)} instead, for which it prints no numbers."
    differing = [
        f"{study.protocol[key]} {key} instead of {value}"
        for key, value in paper.PROTOCOL.items()
        if key in study.protocol and study.protocol[key] != value
    ]
    seeds = max(len(runs) for runs in study.members.values())
    if seeds != paper.SEEDS:
        differing.append(f"{seeds} seeds instead of {paper.SEEDS}")
    if differing:
        yield f"Other than in the paper: {', '.join(differing)}."
