"""Many algorithms in one figure: a small panel per family, everything else as grey background."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedzmg.report.lettering import folded
from fedzmg.report.plots.figures import levels_of
from fedzmg.report.plots.legends import add_title
from fedzmg.report.plots.series import Average, Series, average
from fedzmg.report.plots.style import COLOURS, DASHES, DOTTED, GRID, QUIET_INK, STYLE
from fedzmg.results.averaging import ANY, Range, band_around
from fedzmg.results.grouping import family

COLUMNS = 4
_PANEL_INCHES = (2.5, 1.75)
_NAME_POINTS = 120.0
_LEGEND_SIZE = 6.5
_LEGEND_LINE = 0.13
"""Inches of a line in a legend."""


def panels(
    series: Sequence[Series | Average],
    *,
    title: str,
    ylabel: str,
    threshold: float | Sequence[float] | None = None,
    xlabel: str = "communication round",
    possible: Range = ANY,
) -> Figure:
    """Draw a panel per family; the first series, the reference, is drawn in every panel.

    Args:
        series: one per algorithm, the reference first.
        title: over the whole figure.
        ylabel: name of the metric.
        threshold: levels to mark.
        xlabel: what evaluations are counted by.
        possible: what the metric can be; bands end there.
    """
    averages = [average(one) for one in series]
    families: dict[str, list[Average]] = {}
    for one in averages:
        families.setdefault(family(one.label), []).append(one)
    rows = math.ceil(len(families) / COLUMNS)
    words = {one.label: "\n".join(_folded(one.label, _LEGEND_SIZE)) for one in averages}
    # Long names would cover the curves: they stand below their panels, which get room for them.
    below = any("\n" in own for own in words.values())
    lines = max(
        sum(1 + words[one.label].count("\n") for one in {averages[0], *members})
        for members in families.values()
    )
    higher = _LEGEND_LINE * lines if below else 0.0
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(COLUMNS * _PANEL_INCHES[0], rows * (_PANEL_INCHES[1] + higher) + 0.9),
            layout="constrained",
        )
        FigureCanvasAgg(figure)
        add_title(figure, title)
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for axes, (name, members) in zip(grid.flat, families.items(), strict=False):
            _panel(axes, averages, members, levels_of(threshold), words, possible)
            _add_legend(axes, below=below)
            axes.set_title(
                "\n".join(_folded(name, 9.0, bold=True)),
                loc="left",
                fontsize=9.0,
                fontweight="bold",
                pad=3,
            )
        for axes in grid.flat[len(families) :]:
            axes.set_visible(False)
        # The last row may be short: the panels above its gaps keep their tick labels.
        for axes in grid.flat[max(0, len(families) - COLUMNS) : len(families)]:
            axes.tick_params(labelbottom=True)
        figure.supxlabel(xlabel, fontsize=9.0)
        figure.supylabel(ylabel, fontsize=9.0)
    return figure


def _folded(name: str, size: float, *, bold: bool = False) -> tuple[str, ...]:
    return folded(name, _NAME_POINTS, size, bold=bold, cut=True)


def _panel(
    axes: Axes,
    everything: Sequence[Average],
    members: Sequence[Average],
    levels: Sequence[float],
    words: Mapping[str, str],
    possible: Range,
) -> None:
    for other in everything:
        axes.plot(other.rounds, other.mean, color="#DDDDDD", linewidth=0.6, zorder=1)
    reference = everything[0]
    if reference not in members:
        axes.plot(
            reference.rounds, reference.mean, color=QUIET_INK, linewidth=1.0, zorder=2,
            linestyle=(0, (1.2, 1.2)), label=words[reference.label],
        )  # fmt: skip
    for i, shown in enumerate(members):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(
            shown.rounds, shown.mean, color=colour, linewidth=1.4, zorder=4,
            linestyle=DASHES[i % len(DASHES)], label=words[shown.label],
        )  # fmt: skip
        if shown.spread is not None:
            low, high, _ = band_around(shown.mean, shown.spread, possible)
            axes.fill_between(
                shown.rounds, low, high, color=colour, alpha=0.14, linewidth=0, zorder=3
            )
    for level in levels:
        axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=0.8, zorder=1)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)


def _add_legend(axes: Axes, *, below: bool) -> None:
    place: dict[str, Any] = {"loc": "lower right"}
    if below:
        place = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "borderaxespad": 0.0}
    axes.legend(fontsize=_LEGEND_SIZE, frameon=False, handlelength=2.0, borderpad=0.1, **place)
