"""Charts of what went wrong, where anything did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedzmg.report.html.blocks import Chart, LegendItem
from fedzmg.report.html.svg.curves import Line, curves
from fedzmg.report.html.svg.parts import Frame, swatch
from fedzmg.results.formatting import INDEX
from fedzmg.results.runs import Run
from fedzmg.results.study_result import StudyResult

_Counts = tuple[list[float], list[float]]


def dropped(outcome: StudyResult, key: str) -> Chart | None:
    """Uploads that were refused, by round."""
    lead = "An upload is refused when it is not finite; algorithms without any are left out."
    return _chart(
        outcome, f"{key}-dropped", "Uploads refused in each round", "uploads, all seeds", lead,
        _dropped_by_round,
    )  # fmt: skip


def diverged(outcome: StudyResult, key: str) -> Chart | None:
    """Runs that have diverged, by round."""
    lead = "Algorithms of which every run lived are left out."
    return _chart(
        outcome, f"{key}-diverged", "Runs that have diverged", "runs", lead, _diverged_by_round
    )


def _chart(
    outcome: StudyResult,
    key: str,
    title: str,
    ylabel: str,
    lead: str,
    count: Callable[[Sequence[Run]], _Counts],
) -> Chart | None:
    """Counts by round, of the algorithms that have any."""
    counted = [(label, *count(runs)) for label, runs in outcome.study.members.items()]
    lines = [Line(label, i, x, y) for i, (label, x, y) in enumerate(counted) if any(y)]
    if not lines:
        return None
    totals = "; ".join(f"{line.label}: at most {max(line.y):g}" for line in lines)
    frame = Frame(key, title, f"{totals}.", INDEX, ylabel)
    legend = tuple(LegendItem(swatch(line.style), line.label) for line in lines)
    drawing = curves(lines, frame, whole=True)
    return Chart("trouble", title, lead, drawing.markup, legend, not drawing.named)


def _dropped_by_round(runs: Sequence[Run]) -> _Counts:
    totals: dict[int, float] = {}
    for run in runs:
        for round_, dropped in zip(run.log.rounds, run.log.dropped, strict=True):
            totals[round_ - 1] = totals.get(round_ - 1, 0.0) + dropped
    return [float(index) for index in sorted(totals)], [totals[i] for i in sorted(totals)]


def _diverged_by_round(runs: Sequence[Run]) -> _Counts:
    ends = sorted(float(run.diverged - 1) for run in runs if run.diverged is not None)
    if not ends:
        return [], []
    x, y = [0.0], [0.0]
    for i, end in enumerate(ends):
        x += [end, end]
        y += [float(i), float(i + 1)]
    last = max(run.asked or run.done for run in runs) - 1
    return [*x, float(last)], [*y, float(len(ends))]
