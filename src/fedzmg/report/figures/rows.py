"""One row per algorithm: final values of seeds, differences, and the spread over clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from fedzmg.report.figures.style import (
    COLOURS,
    GHOST,
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

MOST_JOINED = 10
"""Algorithms up to which runs of the same seed are joined by lines."""
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
    study = result.study
    finished = [s for s in result.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finished:
        return None
    colour = {s.label: COLOURS[i % len(COLOURS)] for i, s in enumerate(result.scores)}
    joined = len(finished) <= MOST_JOINED and any(len(s.finals) > 1 for s in finished)
    caption = "A dot is a run, the upright stroke their mean; best first."
    if joined and len(finished) > 1:
        caption += " Thin lines join runs of the same seed."
    chart = Chart(
        f"{study.name}: final {study.metric} of every seed",
        caption,
        (6.4, row_height([score.label for score in finished])),
    )
    axes = chart.body.add_subplot()
    if joined:
        for seed in sorted({seed for score in finished for seed in score.finals}):
            pairs = [(s.finals[seed], y) for y, s in enumerate(finished) if seed in s.finals]
            axes.plot(*zip(*pairs, strict=True), color=GHOST, linewidth=0.8, zorder=1)
    for y, score in enumerate(finished):
        own, values = colour[score.label], list(score.finals.values())
        (dots,) = axes.plot(values, [y] * len(values), "o", color=own, markersize=4.5, zorder=3)
        texts = [f"seed {s}: {value_text(v, study.metric)}" for s, v in score.finals.items()]
        chart.tag(dots, score.label, texts)
        axes.plot([score.mean or 0.0], [y], "|", color=own, markersize=15, markeredgewidth=2)
    notes = [value_text(score.mean, study.metric) for score in finished]
    dress_rows(axes, [score.label for score in finished], notes)
    axes.set_xlabel(f"final {study.metric}")
    format_axis(axes, study.metric, vertical=False)
    return chart


@styled
def differences(result: StudyResult) -> Chart | None:
    """Draw the reference minus every other algorithm with its 95 % interval."""
    study, rows = result.study, []
    for i, score in enumerate(result.scores):
        if score.test is not None and math.isfinite(score.test.mean_difference):
            low, high = score.test.ci_low, score.test.ci_high
            note = f"p = {p_text(score.adjusted)}"
            rows.append(
                Interval(
                    score.label, COLOURS[i % len(COLOURS)], score.test.mean_difference, low, high,
                    note, score.significant,
                )
            )  # fmt: skip
    if not rows:
        return None
    rows.sort(key=lambda row: row.centre)
    side = "Right" if study.higher_is_better else "Left"
    unit = ", in points" if is_share(study.metric) else ""
    chart = Chart(
        f"{study.name}: {study.reference} minus each of the others",
        f"Mean over paired seeds with its 95 % interval. {side} of zero {study.reference} is "
        "better. Filled: significant after Holm's correction (p at the right).",
        (6.4, row_height([row.label for row in rows])),
    )
    axes = _draw_intervals(chart, rows, study.metric, signed=True)
    limits = usual_range(end for row in rows for end in (0.0, row.low, row.high))
    if limits is not None:
        axes.set_xlim(*limits)
        chart.caption += " Intervals that leave the axis are cut."
    axes.axvline(0.0, color=QUIET_INK, linewidth=0.9, zorder=1.5)
    axes.set_xlabel(f"difference of final {study.metric}{unit}")
    return chart


@styled
def intervals(
    title: str, caption: str, xlabel: str, rows: Sequence[Interval], metric: str
) -> Chart:
    """Draw one interval per row."""
    chart = Chart(title, caption, (6.4, row_height([row.label for row in rows])))
    _draw_intervals(chart, rows, metric).set_xlabel(xlabel)
    return chart


def _draw_intervals(
    chart: Chart, rows: Sequence[Interval], metric: str, *, signed: bool = False
) -> Axes:
    axes = chart.body.add_subplot()
    for y, row in enumerate(rows):
        ends = [[row.centre - row.low], [row.high - row.centre]]
        if all(math.isfinite(end[0]) for end in ends):
            axes.errorbar([row.centre], [y], xerr=ends, color=row.colour, capsize=3, linewidth=1.6)
        (mark,) = axes.plot(
            [row.centre], [y], "o", color=row.colour, markersize=7, markeredgewidth=1.6, zorder=3,
            markerfacecolor=row.colour if row.filled else PAPER,
        )  # fmt: skip
        low, high = (value_text(end, metric, signed=signed) for end in (row.low, row.high))
        text = f"{value_text(row.centre, metric, signed=signed)} ({low} to {high})"
        chart.tag(mark, row.label, [text])
    dress_rows(axes, [row.label for row in rows], [row.note for row in rows])
    format_axis(axes, metric, vertical=False, signed=signed)
    return axes


def row_height(labels: Sequence[str]) -> float:
    """Return the height of a figure with these rows, in inches."""
    lines = max(1 + wrapped(label, LABEL_WIDTH).count("\n") for label in labels)
    return 1.35 + max(0.3, 0.1 + 0.15 * lines) * len(labels)


def dress_rows(axes: Axes, labels: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Name rows at the left and note their values at the right."""
    axes.set_yticks(range(len(labels)), [wrapped(label, LABEL_WIDTH) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x")
    if notes:
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(notes)), notes)
        right.tick_params(length=0, labelcolor=QUIET_INK, labelsize=8)
        right.spines[:].set_visible(False)
