"""The table of the paper's printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from fedzmg.report.tables.scores import round_cell
from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results import paper
from fedzmg.results.averaging import arrivals, late_means
from fedzmg.results.formatting import goal_text, signed_text, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.study_result import AlgorithmResult, StudyResult

_ACCURACY = "accuracy"
_HEADS = ("measure", "algorithm", "here", "paper", "difference")

_Row = tuple[str, str, Cell, Cell, Cell]


def beside_paper(result: StudyResult) -> Table | None:
    """Make a row per printed number; None if the paper has none for this task."""
    study = result.study
    twin = paper.COUNTERPARTS.get(study.task)
    if twin is None or study.metric != _ACCURACY:
        return None
    shown = [score for score in result.scores if score.label in twin.dataset.lines]
    if not shown:
        return None
    lines = [*_speeds(study, shown, twin.dataset), *_levels(study, shown, twin.dataset)]
    if study.reference == paper.TESTED:
        lines += _tests(shown, twin.dataset)
    rows = [[Cell(measure), Cell(algorithm), *numbers] for measure, algorithm, *numbers in lines]
    title = f"{study.name} beside the paper's {twin.dataset.title}"
    records = [_record(study.name, line) for line in lines]
    return Table("paper", title, _HEADS, rows, " ".join(_caption(study, twin)), records, 2)


def _record(task: str, line: _Row) -> Record:
    measure, algorithm, here, printed, gap = line
    return {
        "task": task,
        "measure": measure,
        "algorithm": algorithm,
        "here": here.value if here.text != "never" else None,
        "paper": printed.value,
        "difference": gap.value,
    }


def _speeds(study: Study, shown: list[AlgorithmResult], dataset: paper.Dataset) -> Iterator[_Row]:
    for level, name in zip(paper.THRESHOLDS, ("to_low", "to_high"), strict=True):
        measure = f"index at {goal_text(level, _ACCURACY)}"
        for score in shown:
            reached = arrivals(study, study.members[score.label], level).averaged
            index = None if reached is None else reached - 1
            printed: int = getattr(dataset.lines[score.label], name)
            gap = None if index is None else index - printed
            difference = NOTHING if gap is None else Cell(signed_text(gap, ",d"), gap)
            yield (
                measure, score.label, round_cell(index), Cell(f"{printed:,}", printed), difference
            )  # fmt: skip


def _levels(study: Study, shown: list[AlgorithmResult], dataset: paper.Dataset) -> Iterator[_Row]:
    # The paper's slowest is among its own algorithms, so others must not move the start.
    late, _ = late_means(study.only(score.label for score in shown), paper.THRESHOLDS[1])
    for score in shown:
        value, printed = late.get(score.label), dataset.lines[score.label].late
        gap = None if value is None else value - printed
        yield (
            "late-stage mean", score.label, _share(value), _share(printed),
            _share(gap, signed=True),
        )  # fmt: skip
    for score in shown:
        yield "final accuracy", score.label, _share(score.mean), NOTHING, NOTHING


def _share(value: float | None, *, signed: bool = False) -> Cell:
    return NOTHING if value is None else Cell(value_text(value, _ACCURACY, signed=signed), value)


def _tests(shown: list[AlgorithmResult], dataset: paper.Dataset) -> Iterator[_Row]:
    pairs = [(s, dataset.tests[s.label]) for s in shown if s.label in dataset.tests]
    for score, printed in pairs:
        t = None if score.test is None else score.test.t
        gap = NOTHING if t is None else _number(t - printed.t, "+.3f")
        yield "paired t", score.label, _number(t, "+.3f"), _number(printed.t, "+.3f"), gap
    for score, printed in pairs:
        p = None if score.test is None else score.test.p
        gap = NOTHING if p is None else _number(p - printed.p, "+.3g")
        yield "p, uncorrected", score.label, _number(p, ".4g"), _number(printed.p, ".4g"), gap


def _number(value: float | None, form: str) -> Cell:
    if value is None:
        return NOTHING
    signed = form.startswith("+")
    return Cell(signed_text(value, form[1:]) if signed else format(value, form), value)


def _caption(study: Study, twin: paper.Counterpart) -> Iterator[str]:
    if twin.stands_in:
        yield (
            f"{study.task} only stands in for the paper's {twin.dataset.title}: the data differ, "
            "so the differences say little."
        )
    low, high = (goal_text(level, _ACCURACY) for level in paper.THRESHOLDS)
    yield (
        "The paper counts from 0: index 80 is round 81. Late stage: mean accuracy after the "
        f"slowest of these algorithms reached {high}. The paper's tables have {low} and {high} for "
        f"every data set; it prints no final accuracies. t and p: paired test of {paper.TESTED} "
        "minus the algorithm, not corrected, as in the paper. Difference: here minus paper."
    )
    other = [level for level in twin.dataset.text_thresholds if level not in paper.THRESHOLDS]
    if other:
        goals = " and ".join(goal_text(level, _ACCURACY) for level in other)
        yield f"Its text names {goals} instead, for which it prints no numbers."
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
