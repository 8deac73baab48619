"""Test curves by round or by traffic: one panel, or one per family of algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedzmg.report.figures.style import (
    COLOURS,
    DOTTED,
    GHOST,
    MARKERS,
    QUIET_INK,
    Chart,
    format_axis,
    line_style,
    styled,
    wrapped,
)
from fedzmg.results.averaging import band_around
from fedzmg.results.formatting import MIB, count_text, goal_text, spread_text, value_text
from fedzmg.results.grouping import family
from fedzmg.results.study_result import StudyResult

MOST_IN_ONE_PANEL = 10
MOST_POINTS = 300
"""Vertices of a drawn curve; longer curves are thinned."""
COLUMNS = 4
_LONG_PANEL_LABEL = 26
"""Characters of a label beyond which the legend of a panel moves below it."""
_PANEL_INCHES = (2.5, 1.9)
_STEPS = [1, 2, 2.5, 5, 10]


class MeanCurve(NamedTuple):
    """A mean curve of several runs."""

    label: str
    x: NDArray[Any]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None
    averaged: int
    broke_off: bool = False
    """True if every run diverged."""

    def thinned(self) -> MeanCurve:
        """Keep every n-th point and the last."""
        step = -(-len(self.x) // MOST_POINTS)
        if step <= 1:
            return self
        kept = sorted({*range(0, len(self.x), step), len(self.x) - 1})
        spread = None if self.spread is None else self.spread[kept]
        return self._replace(x=self.x[kept], mean=self.mean[kept], spread=spread)


@styled
def curves(result: StudyResult) -> Chart | None:
    """Draw the mean test curve of every algorithm; None if nothing was evaluated."""
    study = result.study
    lines = [
        MeanCurve(s.shown_label, c.rounds, c.mean, c.spread, c.averaged, c.broke_off)
        for s in result.scores
        if (c := s.curve) is not None
    ]
    if not lines:
        return None
    seeds = count_text(len({run.seed for run in study.runs}), "seed")
    return _drawn(lines, f"{study.name}, {seeds}", study.metric, study.thresholds)


@styled
def traffic(result: StudyResult) -> Chart | None:
    """Draw the metric against traffic: curves, or final values of many algorithms."""
    study = result.study
    lines = [
        MeanCurve(s.shown_label, c.mib, c.mean, c.spread, c.averaged, c.broke_off)
        for s in result.scores
        if (c := s.curve) is not None
    ]
    if not lines:
        return None
    xlabel = "MiB moved, all clients, both ways"
    if len(lines) <= MOST_IN_ONE_PANEL:
        chart = Chart(
            f"{study.name}: test {study.metric} by traffic",
            "The further left, the cheaper.",
        )
        _one_panel(chart, [line.thinned() for line in lines], study.metric, study.thresholds, "MiB")
        chart.axes[0].set_xlabel(xlabel)
        chart.axes[0].xaxis.set_major_formatter("{x:,.10g}")
        return chart
    chart = Chart(
        f"{study.name}: final {study.metric} by traffic",
        "Each mark is an algorithm: high and left is good.",
        (8.5, 4.8),
    )
    axes = chart.body.add_subplot()
    labels = []
    for i, score in enumerate(result.ranked):
        if score.mean is not None and math.isfinite(score.mean):
            x = score.traffic["total"] / MIB
            (mark,) = axes.plot(
                [x], [score.mean], linestyle="none", markersize=6.0,
                marker=MARKERS[1 + i // 7 % 6], color=COLOURS[i % len(COLOURS)],
            )  # fmt: skip
            text = f"{x:,.0f} MiB: {spread_text(score.mean, score.sd, study.metric)}"
            chart.tag(mark, score.label, [text])
            labels.append(score.label)
    axes.grid()
    axes.set_xlabel(f"{xlabel}, one run")
    axes.set_ylabel(f"final {study.metric}")
    format_axis(axes, study.metric)
    chart.name_series(axes.get_lines(), labels)
    return chart


def _drawn(lines: Sequence[MeanCurve], title: str, metric: str, levels: Sequence[float]) -> Chart:
    caption = _caption(lines, metric)
    title = f"{title}: test {metric} by round"
    thin = [line.thinned() for line in lines]
    if len(lines) > MOST_IN_ONE_PANEL:
        return _panels(thin, title, caption, metric, levels)
    chart = Chart(title, caption, (9.0, 4.8))
    axes = _one_panel(chart, thin, metric, levels, "round")
    axes.set_xlabel("round")
    return chart


def _one_panel(
    chart: Chart, lines: Sequence[MeanCurve], metric: str, levels: Sequence[float], unit: str
) -> Axes:
    axes = chart.body.add_subplot()
    named: list[tuple[float, Artist, str]] = []
    for i, line in enumerate(lines):
        artist = _draw_line(chart, axes, line, i, metric, unit, zorder=3.0 - 0.5 * i / len(lines))
        named.append((float(line.mean[-1]), artist, line.label))
    _draw_levels(axes, levels)
    axes.grid()
    axes.set_ylabel(f"test {metric}")
    _limit(axes, lines)
    format_axis(axes, metric)
    # Names are in the order in which the curves end.
    named.sort(key=lambda one: -one[0])
    _, handles, labels = (list(column) for column in zip(*named, strict=True))
    for level in levels:
        handles.append(Line2D([], [], color=QUIET_INK, linestyle=DOTTED, linewidth=1.2))
        labels.append(f"threshold {goal_text(level, metric)}")
    chart.name_series(handles, labels)
    return axes


def _panels(
    lines: Sequence[MeanCurve], title: str, caption: str, metric: str, levels: Sequence[float]
) -> Chart:
    """Draw a panel per family over all other curves in grey, the reference in every panel."""
    families: dict[str, list[MeanCurve]] = {}
    for line in lines:
        families.setdefault(family(line.label), []).append(line)
    rows = -(-len(families) // COLUMNS)
    width, height = _PANEL_INCHES
    long = max(len(line.label) for line in lines) > _LONG_PANEL_LABEL
    entries = max(map(len, families.values())) + 1
    below = 0.28 * entries if long else 0.0
    chart = Chart(
        title,
        f"{caption} Grey: all other algorithms.",
        (COLUMNS * width, rows * (height + below) + 0.8),
    )
    grid = chart.body.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    everything = _joined(lines)
    reference = lines[0]
    for axes, (name, members) in zip(grid.flat, families.items(), strict=False):
        axes.plot(*everything, color=GHOST, linewidth=0.6, zorder=1)
        shown = list(members)
        handles = [
            _draw_line(chart, axes, line, i, metric, "round", zorder=4.0, width=1.4)
            for i, line in enumerate(members)
        ]
        if reference not in members:
            (dotted,) = axes.plot(
                reference.x, reference.mean, color=QUIET_INK, linewidth=1.0, zorder=2,
                linestyle=(0, (1.2, 1.2)),
            )  # fmt: skip
            shown.append(reference)
            handles.append(dotted)
        _draw_levels(axes, levels)
        axes.grid(linewidth=0.6)
        axes.tick_params(labelsize=7)
        format_axis(axes, metric)
        axes.set_title(wrapped(name, 26), loc="left", fontsize=9.0, fontweight="bold", pad=3)
        corner: dict[str, Any] = {"loc": "best"}
        if long:
            corner = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "borderaxespad": 0.0}
        legend = axes.legend(
            handles, [wrapped(line.label, 36) for line in shown], fontsize=6.5, handlelength=2.0,
            borderpad=0.1, labelspacing=0.3, **corner,
        )  # fmt: skip
        chart.tag_legend(legend, [line.label for line in shown])
    _limit(grid.flat[0], lines)
    for axes in grid.flat[len(families) :]:
        axes.set_visible(False)
    # Panels above the gaps of a short last row keep their tick labels.
    for axes in grid.flat[max(0, len(families) - COLUMNS) : len(families)]:
        axes.tick_params(labelbottom=True)
    chart.body.supxlabel("round", fontsize=9.0)
    chart.body.supylabel(f"test {metric}", fontsize=9.0)
    return chart


def _joined(lines: Sequence[MeanCurve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Join curves into one with gaps."""
    gap = np.array([np.nan])
    x = [part for line in lines for part in (line.x, gap)]
    y = [part for line in lines for part in (line.mean, gap)]
    return np.concatenate(x), np.concatenate(y)


def _draw_line(
    chart: Chart,
    axes: Axes,
    line: MeanCurve,
    position: int,
    metric: str,
    unit: str,
    *,
    zorder: float,
    width: float = 1.7,
) -> Line2D:
    """Draw a curve with a band of one standard deviation; a cross ends one that diverged."""
    style = line_style(position)
    if len(line.x) == 1 and not style["marker"]:
        style["marker"] = "o"
    every = max(1, len(line.x) // 8)
    (artist,) = axes.plot(
        line.x, line.mean, linewidth=width, zorder=zorder, markevery=every, **style
    )
    spreads: Sequence[float | None] = [None] * len(line.x)
    if line.spread is not None:
        low, high, _ = band_around(line.mean, line.spread, metric)
        band = axes.fill_between(
            line.x, low, high, color=style["color"], alpha=0.14, linewidth=0.0, zorder=2.0
        )
        chart.tag(band, line.label)
        spreads = line.spread.tolist()
    texts = [
        f"{_position(unit, x)}: {spread_text(mean, spread, metric)}"
        for x, mean, spread in zip(line.x.tolist(), line.mean.tolist(), spreads, strict=True)
    ]
    chart.tag(artist, line.label, texts)
    if line.broke_off:
        (cross,) = axes.plot(
            line.x[-1:], line.mean[-1:], color=style["color"], marker="x", markersize=6.0,
            markeredgewidth=1.7, linestyle="none", clip_on=False, zorder=4.5,
        )  # fmt: skip
        chart.tag(cross, line.label)
    return artist


def _position(unit: str, x: float) -> str:
    return f"{unit} {x:,g}" if unit == "round" else f"{x:,.1f} {unit}"


def _draw_levels(axes: Axes, levels: Sequence[float]) -> None:
    for level in levels:
        axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=1.2, zorder=1.5)


def _limit(axes: Axes, lines: Sequence[MeanCurve]) -> None:
    """Start at zero and end with the longest curve."""
    axes.set_xlim(0.0, max(float(line.x[-1]) for line in lines) or 1.0)
    axes.margins(y=0.04)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=_STEPS, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=_STEPS))


def _caption(lines: Sequence[MeanCurve], metric: str) -> str:
    """Describe the number of averaged runs, the thinning and the last values."""
    counts = sorted({line.averaged for line in lines})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = f"Mean of {number} runs; the band is one standard deviation either way"
    cut = any(
        line.spread is not None and band_around(line.mean, line.spread, metric).cut
        for line in lines
    )
    words += ", cut to possible values." if cut else "."
    if counts == [1]:
        words = "One run each."
    longest = max(len(line.x) for line in lines)
    if longest > MOST_POINTS:
        step = -(-longest // MOST_POINTS)
        words += f" Drawn with one of {step} evaluations; tables and files have all of them."
    ends = [f"{line.label} {value_text(float(line.mean[-1]), metric)}" for line in lines]
    if len(ends) <= MOST_IN_ONE_PANEL:
        words += f" Last values: {', '.join(ends)}."
    return words
