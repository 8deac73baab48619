"""Figures of validation curves, ready for print.

A figure is built without the global state of pyplot and saved so that the same data give the same
bytes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedzmg.report.lettering import folded, widest
from fedzmg.report.plots.endlabels import (
    CAPTION_POINTS,
    EDGE_POINTS,
    FIGURE_INCHES,
    POINTS_PER_INCH,
    SCREEN_DPI,
    add_legend,
    label_ends,
    level_words,
)
from fedzmg.report.plots.series import Average, Series, average
from fedzmg.report.plots.style import COLOURS, DASHES, DOTTED, GRID, QUIET_INK, STYLE
from fedzmg.results.averaging import ANY, Band, Range, band_around

MOST_DIRECT_LABELS = 7
"""More curves than this are named in a legend, for want of room at the line ends."""
# Once the dash patterns repeat, markers keep curves apart in greyscale.
_MARKERS = ("", "o", "s", "^", "D", "v", "P")
_TITLE_CHARACTERS = 60
_TITLE_SIZE = 11.0


def curves(
    series: Sequence[Series | Average],
    *,
    title: str,
    ylabel: str,
    threshold: float | Sequence[float] | None = None,
    xlabel: str = "communication round",
    possible: Range = ANY,
) -> Figure:
    """Draw the mean curve of each series with a band of one standard deviation.

    Diverged runs are left out of the mean, and the label counts them. A series whose runs have
    all diverged is drawn up to the first non-finite value and ends in a cross.

    Args:
        series: The algorithms to compare. Up to seven are named at the line ends, more in a
            legend beside the axes; about twenty remain readable.
        title: Title of the figure.
        ylabel: Name of the metric.
        threshold: Values at which to draw dotted lines.
        xlabel: What evaluations are counted by.
        possible: What the metric can be; bands end there.

    Returns:
        A figure that belongs to no window.

    Raises:
        ValueError: If there is no series or a threshold is not finite.
    """
    if not series:
        raise ValueError("series must hold at least one curve, got none")
    lines = textwrap.wrap(title, _TITLE_CHARACTERS)
    figure = _drawn(series, lines, ylabel, levels_of(threshold), xlabel, possible)
    left = figure.axes[0].get_position().x0
    room = (1.0 - left) * figure.get_figwidth() * POINTS_PER_INCH - EDGE_POINTS
    if lines and widest(lines, _TITLE_SIZE, bold=True) > room:
        # Only now is known where the axes begin, which depends on the numbers beside them.
        lines = list(folded(title, room, _TITLE_SIZE, bold=True, cut=True))
        figure = _drawn(series, lines, ylabel, levels_of(threshold), xlabel, possible)
    return figure


def _drawn(
    series: Sequence[Series | Average],
    title: Sequence[str],
    ylabel: str,
    levels: Sequence[float],
    xlabel: str,
    possible: Range,
) -> Figure:
    averages = [average(one) for one in series]
    bands = [
        None if one.spread is None else band_around(one.mean, one.spread, possible)
        for one in averages
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=FIGURE_INCHES, dpi=SCREEN_DPI, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.1, 0.12, 0.7, 0.75))
        entries = [
            (_end_height(one), one.label, _draw_curve(axes, one, around, position, len(series)))
            for position, (one, around) in enumerate(zip(averages, bands, strict=True))
        ]
        entries += [(level, level_words(level), _draw_threshold(axes, level)) for level in levels]
        cut = any(around is not None and around.cut for around in bands)
        _dress(axes, title, _caption(averages, cut=cut), xlabel, ylabel)
        _set_limits(axes, [one.rounds for one in series])
        if len(series) <= MOST_DIRECT_LABELS:
            ends = [(one, COLOURS[i % len(COLOURS)]) for i, one in enumerate(averages)]
            label_ends(figure, axes, ends, levels)
        else:
            add_legend(figure, axes, entries)
    return figure


def levels_of(threshold: float | Sequence[float] | None) -> list[float]:
    """No, one or several thresholds as a list.

    Raises:
        ValueError: If one is not finite.
    """
    if threshold is None:
        return []
    levels = list(threshold) if isinstance(threshold, Sequence) else [threshold]
    for level in levels:
        if not math.isfinite(level):
            raise ValueError(f"threshold must be finite, got {level}")
    return levels


def _end_height(shown: Average) -> float:
    """Return the height at which a curve ends, or minus infinity if nothing could be drawn."""
    return float(shown.mean[-1]) if len(shown.mean) else -math.inf


def _caption(averages: Sequence[Average], *, cut: bool) -> str:
    """Say over how many runs the curves are averaged, and whether a band is cut."""
    counts = sorted({one.averaged for one in averages})
    if counts == [1]:
        return "single run"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = f"mean ± 1 standard deviation, {number} runs"
    return f"{words}; bands cut to what is possible" if cut else words


def _draw_curve(
    axes: Axes, shown: Average, around: Band | None, position: int, total: int
) -> Line2D:
    """Draw the line and the band of one series."""
    colour = COLOURS[position % len(COLOURS)]
    repeats = position // len(DASHES)
    crowded = total > MOST_DIRECT_LABELS
    evaluations = len(shown.rounds)
    spacing = max(1, evaluations // 8)
    (line,) = axes.plot(
        shown.rounds,
        shown.mean,
        color=colour,
        linestyle=DASHES[position % len(DASHES)],
        linewidth=1.2 if crowded else 1.7,
        # A single evaluation has no line and would not show without a marker.
        marker=_MARKERS[repeats % len(_MARKERS)] if evaluations > 1 else "o",
        markersize=3.6,
        # Staggered, so that the markers of neighbouring curves do not cover each other.
        markevery=(position * spacing // total, spacing),
        # First curves on top: the proposed method usually comes first.
        zorder=3.0 - 0.5 * position / total,
        solid_capstyle="round",
    )
    if around is not None:
        axes.fill_between(
            shown.rounds,
            around.low,
            around.high,
            color=colour,
            alpha=0.06 if crowded else 0.16,
            linewidth=0.0,
            zorder=2.0,
        )
    if shown.broke_off and evaluations:
        axes.plot(
            shown.rounds[-1:],
            shown.mean[-1:],
            color=colour,
            marker="x",
            markersize=6.0,
            markeredgewidth=1.7,
            linestyle="none",
            clip_on=False,
            zorder=4.0,
        )
    return line


def _draw_threshold(axes: Axes, threshold: float) -> Line2D:
    """Draw the dotted line of the threshold."""
    return axes.axhline(threshold, color=QUIET_INK, linestyle=DOTTED, linewidth=1.2, zorder=1.5)


def _dress(axes: Axes, title: Sequence[str], caption: str, xlabel: str, ylabel: str) -> None:
    """Set title, axis names, grid and frame."""
    axes.set_title(
        # Wrapped by hand: a title wider than the figure would be cut off.
        "\n".join(title),
        loc="left",
        pad=CAPTION_POINTS,
        fontsize=_TITLE_SIZE,
        fontweight="bold",
    )
    axes.annotate(
        caption,
        (0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0.0, 8.0),
        textcoords="offset points",
        fontsize=8.0,
        color=QUIET_INK,
    )
    axes.set_xlabel(xlabel, labelpad=6.0)
    axes.set_ylabel(ylabel, labelpad=6.0)
    axes.grid(visible=True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3.0, width=0.8)
    round_steps = [1, 2, 2.5, 5, 10]
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=round_steps, integer=True, min_n_ticks=1)
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=round_steps))


def _set_limits(axes: Axes, every: Sequence[NDArray[Any]]) -> None:
    """Start the rounds at zero and end them with the longest series."""
    rounds = max(every, key=lambda one: float(one[-1]) if len(one) else -math.inf)
    last = float(rounds[-1])
    spacing = last - float(rounds[-2]) if len(rounds) > 1 else 1.0
    # A thousand rounds evaluated every five end at 995: go on to the tick that a reader expects.
    end = last + spacing if spacing <= 0.02 * last else last
    axes.set_xlim(0.0, max(1.0, end))
    axes.margins(y=0.04)
    # Fix what autoscaling found: the end labels are placed for exactly these limits.
    axes.set_ylim(*axes.get_ylim())
