"""One row per algorithm: final values of seeds, differences, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from fedzmg.report.figures.style import (
    COLOURS,
    GHOST,
    MOST_IN_ONE_PANEL,
    PAPER,
    QUIET_INK,
    Chart,
    format_axis,
    styled,
    usual_range,
    wrapped,
)
from fedzmg.results.formatting import is_share, p_text, value_text
from fedzmg.results.study_result import StudyResult

LABEL_WIDTH = 34


class Interval(NamedTuple):
    """A row with a centre and an interval around it."""

    label: str
    colour: str
    centre: float
    low: float
    high: float
    note: str
    filled: bool = True


@styled
def seeds(result: StudyResult) -> Chart | None:
    """Draw the final value of every run, best algorithm first."""
    metric = result.study.metric
    finished = [s for s in result.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finished:
        return None
    labels = [score.label for score in finished]
    caption = "A dot is a run, the upright stroke their mean; best first."
    joined = 1 < len(finished) <= MOST_IN_ONE_PANEL and any(len(s.finals) > 1 for s in finished)
    if joined:
        caption += " Thin lines join runs of the same seed."
    chart = row_chart(f"{result.study.name}: final {metric} of every seed", caption, labels)
    axes = chart.body.add_subplot()
    for seed in sorted({seed for score in finished for seed in score.finals} if joined else ()):
        pairs = [(s.finals[seed], y) for y, s in enumerate(finished) if seed in s.finals]
        axes.plot(*zip(*pairs, strict=True), color=GHOST, linewidth=0.8, zorder=1)
    for y, score in enumerate(finished):
        own, values = COLOURS[result.scores.index(score) % len(COLOURS)], score.finals.values()
        (dots,) = axes.plot([*values], [y] * len(values), "o", color=own, markersize=4.5, zorder=3)
        texts = [f"seed {s}: {value_text(v, metric)}" for s, v in score.finals.items()]
        chart.tag(dots, score.label, texts)
        axes.plot([score.mean or 0.0], [y], "|", color=own, markersize=15, markeredgewidth=2)
    _name_rows(axes, labels, [value_text(score.mean, metric) for score in finished])
    axes.set_xlabel(f"final {metric}")
    format_axis(axes, metric, vertical=False)
    return chart


@styled
def differences(result: StudyResult) -> Chart | None:
    """Draw the reference minus every other algorithm with its 95 % interval."""
    study, rows = result.study, []
    for i, score in enumerate(result.scores):
        test = score.test
        if test is not None and math.isfinite(test.mean_difference):
            ends = (test.mean_difference, test.ci_low, test.ci_high)
            note = f"p = {p_text(score.adjusted)}"
            colour = COLOURS[i % len(COLOURS)]
            rows.append(Interval(score.label, colour, *ends, note, score.significant))
    if not rows:
        return None
    rows.sort(key=lambda row: row.centre)
    side = "Right" if study.higher_is_better else "Left"
    title = f"{study.name}: {study.reference} minus each of the others"
    caption = (
        f"Mean over paired seeds with its 95 % interval. {side} of zero {study.reference} is "
        "better. Filled: significant after Holm's correction (p at the right)."
    )
    chart = row_chart(title, caption, [row.label for row in rows])
    axes = draw_intervals(chart, rows, study.metric, signed=True)
    limits = usual_range(end for row in rows for end in (0.0, row.low, row.high))
    if limits is not None:
        axes.set_xlim(*limits)
        chart.caption += " Intervals that leave the axis are cut."
    axes.axvline(0.0, color=QUIET_INK, linewidth=0.9, zorder=1.5)
    unit = ", in points" if is_share(study.metric) else ""
    axes.set_xlabel(f"difference of final {study.metric}{unit}")
    return chart


def row_chart(title: str, caption: str, labels: Sequence[str]) -> Chart:
    """Make a figure as high as its rows."""
    lines = max(1 + wrapped(label, LABEL_WIDTH).count("\n") for label in labels)
    return Chart(title, caption, (6.4, 1.35 + max(0.3, 0.1 + 0.15 * lines) * len(labels)))


def draw_intervals(
    chart: Chart, rows: Sequence[Interval], metric: str, *, signed: bool = False
) -> Axes:
    """Draw one interval per row."""
    axes = chart.body.add_subplot()
    for y, row in enumerate(rows):
        ends = [[row.centre - row.low], [row.high - row.centre]]
        if all(math.isfinite(end[0]) for end in ends):
            axes.errorbar([row.centre], [y], xerr=ends, color=row.colour, capsize=3, linewidth=1.6)
        (mark,) = axes.plot(
            [row.centre], [y], "o", color=row.colour, markersize=7, markeredgewidth=1.6, zorder=3,
            markerfacecolor=row.colour if row.filled else PAPER,
        )  # fmt: skip
        centre, low, high = (value_text(end, metric, signed=signed) for end in row[2:5])
        chart.tag(mark, row.label, [f"{centre} ({low} to {high})"])
    _name_rows(axes, [row.label for row in rows], [row.note for row in rows])
    format_axis(axes, metric, vertical=False, signed=signed)
    return axes


def _name_rows(axes: Axes, labels: Sequence[str], notes: Sequence[str]) -> None:
    """Name rows at the left and note their values at the right."""
    axes.set_yticks(range(len(labels)), [wrapped(label, LABEL_WIDTH) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x")
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(notes)), notes)
    right.tick_params(length=0, labelcolor=QUIET_INK, labelsize=8)
    right.spines[:].set_visible(False)
