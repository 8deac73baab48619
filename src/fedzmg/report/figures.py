"""Figures of validation curves, ready for print.

A figure is built without the global state of pyplot and saved so that the same data give the same
bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedzmg.files import write_atomic

PNG_DPI = 150
MOST_DIRECT_LABELS = 7
"""More curves than this are named in a legend, for want of room at the line ends."""

# Okabe and Ito's palette, which keeps apart under all common colour blindness, less its yellow,
# which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# Five dash patterns against seven colours: the pairs repeat only after 35 curves.
DASHES: tuple[Any, ...] = (
    "solid",
    (0, (5.0, 1.6)),
    (0, (6.0, 1.6, 1.2, 1.6)),
    (0, (1.2, 1.2)),
    (0, (9.0, 1.6, 1.2, 1.6, 1.2, 1.6)),
)
# Once the dash patterns repeat, markers keep curves apart in greyscale.
_MARKERS = ("", "o", "s", "^", "D", "v", "P")
_INK = "#222222"
QUIET_INK = "#6B6B6B"
GRID = "#E4E4E4"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "mathtext.fontset": "dejavusans",
    "text.color": _INK,
    "text.usetex": False,
    "axes.edgecolor": QUIET_INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "xtick.color": QUIET_INK,
    "ytick.color": QUIET_INK,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    # A fixed salt: matplotlib otherwise names the parts of an SVG at random.
    "svg.hashsalt": "fedzmg",
    "svg.fonttype": "path",
}
_FIGURE_INCHES = (7.0, 4.2)
_SCREEN_DPI = 100.0
_POINTS_PER_INCH = 72.0
_POINTS_PER_PIXEL = _POINTS_PER_INCH / _SCREEN_DPI
_NARROWEST_AXES_POINTS = 270.0
_TITLE_CHARACTERS = 60
_TITLE_LINE_POINTS = 13.0
_CAPTION_POINTS = 23.0
_LEGEND_ROWS = 21
_LABEL_SIZE = 9.0
_LABEL_GAP_POINTS = 12.5
_LEADER_POINTS = 16.0
_EDGE_POINTS = 8.0


@dataclass(frozen=True, eq=False)
class Series:
    """The runs of one algorithm.

    Attributes:
        label: Name shown in the figure.
        rounds: Strictly increasing round indices of the evaluations.
        runs: Values ``[runs, evaluations]``; a run that holds a non-finite value has diverged.
    """

    label: str
    rounds: NDArray[Any]
    runs: NDArray[Any]

    def __post_init__(self) -> None:
        """Raise ValueError if the arrays do not belong together."""
        if self.rounds.ndim != 1 or self.rounds.size == 0:
            raise ValueError(
                f"rounds of {self.label!r} must be a non-empty list, "
                f"got the shape {self.rounds.shape}"
            )
        if np.any(np.diff(self.rounds) <= 0):
            raise ValueError(f"rounds of {self.label!r} must strictly increase")
        if self.runs.ndim != 2 or len(self.runs) == 0 or self.runs.shape[1] != len(self.rounds):
            raise ValueError(
                f"runs of {self.label!r} must have the shape [runs, {len(self.rounds)}], "
                f"got {self.runs.shape}"
            )


@dataclass(frozen=True, eq=False)
class _Summary:
    """What is drawn of a series: mean, spread (None for one run), and whether it broke off."""

    label: str
    rounds: NDArray[Any]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None
    averaged: int
    broke_off: bool


@dataclass(frozen=True)
class _EndLabel:
    """A label beside the axes, and the point it names (None if nothing could be drawn)."""

    text: str
    colour: tuple[float, float, float]
    point: tuple[float, float] | None


def curves(
    series: Sequence[Series],
    *,
    title: str,
    ylabel: str,
    threshold: float | None = None,
) -> Figure:
    """Draw the mean curve of each series with a band of one standard deviation.

    Diverged runs are left out of the mean, and the label counts them. A series whose runs have
    all diverged is drawn up to the first non-finite value and ends in a cross.

    Args:
        series: The algorithms to compare. Up to seven are named at the line ends, more in a
            legend beside the axes; about twenty remain readable.
        title: Title of the figure.
        ylabel: Name of the metric.
        threshold: Value at which to draw a dotted line.

    Returns:
        A figure that belongs to no window.

    Raises:
        ValueError: If there is no series or the threshold is not finite.
    """
    if not series:
        raise ValueError("series must hold at least one curve, got none")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold}")
    summaries = [summarize(one) for one in series]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_FIGURE_INCHES, dpi=_SCREEN_DPI, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.1, 0.12, 0.7, 0.75))
        entries = [
            (_end_height(one), one.label, _draw_curve(axes, one, position, len(series)))
            for position, one in enumerate(summaries)
        ]
        if threshold is not None:
            line = _draw_threshold(axes, threshold)
            entries.append((threshold, _threshold_label(threshold), line))
        _dress(axes, title, _caption(summaries), ylabel)
        _set_limits(axes, series)
        if len(series) <= MOST_DIRECT_LABELS:
            _label_ends(figure, axes, summaries, threshold)
        else:
            _add_legend(figure, axes, entries)
    return figure


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and SVG.

    Each file appears complete or not at all, and saving again gives the same bytes.

    Args:
        figure: The figure.
        stem: Path of the files without their suffix; missing folders are made.

    Returns:
        The paths of the PNG and of the SVG.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    # Not with_suffix: a name such as lr0.1 holds a dot that is no suffix.
    png, svg = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg"))
    write_atomic(png, _rendered(figure, "png", {"Software": None}))
    write_atomic(svg, _rendered(figure, "svg", {"Date": None, "Creator": None}))
    return png, svg


def _rendered(figure: Figure, file_format: str, metadata: dict[str, Any]) -> bytes:
    """Return the figure as the content of a file."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=file_format, dpi=PNG_DPI, metadata=metadata)
    return buffer.getvalue()


def summarize(series: Series) -> _Summary:
    """Average the finite runs of a series and count the others in its label."""
    runs = np.asarray(series.runs, dtype=np.float64)
    finite = np.isfinite(runs)
    completed = finite.all(axis=1)
    diverged = int(np.count_nonzero(~completed))
    label, rounds = series.label, series.rounds
    if completed.any():
        runs = runs[completed]
        if diverged:
            label = f"{label} ({diverged} diverged)"
    else:
        shared = int(np.argmin(finite.all(axis=0)))
        rounds, runs = rounds[:shared], runs[:, :shared]
        label = f"{label} (diverged)" if diverged == 1 else f"{label} (all {diverged} diverged)"
    spread = runs.std(axis=0, ddof=1) if len(runs) > 1 else None
    return _Summary(label, rounds, runs.mean(axis=0), spread, len(runs), not completed.any())


def _end_height(summary: _Summary) -> float:
    """Return the height at which a curve ends, or minus infinity if nothing could be drawn."""
    return float(summary.mean[-1]) if len(summary.mean) else -math.inf


def _caption(summaries: Sequence[_Summary]) -> str:
    """Say over how many runs the curves are averaged."""
    counts = sorted({one.averaged for one in summaries})
    if counts == [1]:
        return "single run"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean ± 1 standard deviation, {number} runs"


def _draw_curve(axes: Axes, summary: _Summary, position: int, total: int) -> Line2D:
    """Draw the line and the band of one series."""
    colour = COLOURS[position % len(COLOURS)]
    repeats = position // len(DASHES)
    crowded = total > MOST_DIRECT_LABELS
    evaluations = len(summary.rounds)
    spacing = max(1, evaluations // 8)
    (line,) = axes.plot(
        summary.rounds,
        summary.mean,
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
    if summary.spread is not None:
        axes.fill_between(
            summary.rounds,
            summary.mean - summary.spread,
            summary.mean + summary.spread,
            color=colour,
            alpha=0.06 if crowded else 0.16,
            linewidth=0.0,
            zorder=2.0,
        )
    if summary.broke_off and evaluations:
        axes.plot(
            summary.rounds[-1:],
            summary.mean[-1:],
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
    return axes.axhline(
        threshold, color=QUIET_INK, linestyle=(0, (1.0, 2.2)), linewidth=1.2, zorder=1.5
    )


def _threshold_label(threshold: float) -> str:
    """Name the threshold."""
    return f"threshold {threshold:g}"


def _dress(axes: Axes, title: str, caption: str, ylabel: str) -> None:
    """Set title, axis names, grid and frame."""
    axes.set_title(
        # Wrapped by hand: a title wider than the figure would be cut off.
        "\n".join(textwrap.wrap(title, _TITLE_CHARACTERS)),
        loc="left",
        pad=_CAPTION_POINTS,
        fontsize=11.0,
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
    axes.set_xlabel("communication round", labelpad=6.0)
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


def _set_limits(axes: Axes, series: Sequence[Series]) -> None:
    """Start the rounds at zero and end them with the longest series."""
    rounds = max((one.rounds for one in series), key=lambda one: float(one[-1]))
    last = float(rounds[-1])
    spacing = last - float(rounds[-2]) if len(rounds) > 1 else 1.0
    # A thousand rounds evaluated every five end at 995: go on to the tick that a reader expects.
    end = last + spacing if spacing <= 0.02 * last else last
    axes.set_xlim(0.0, max(1.0, end))
    axes.margins(y=0.04)
    # Fix what autoscaling found: the end labels are placed for exactly these limits.
    axes.set_ylim(*axes.get_ylim())


def _label_ends(
    figure: Figure, axes: Axes, summaries: Sequence[_Summary], threshold: float | None
) -> None:
    """Name each curve where it ends, moved apart where the ends are close."""
    labels = _end_labels(axes, summaries, threshold)
    widest = max(_text_width(axes, label.text) for label in labels)
    width, height = _fit(figure, axes, right=_LEADER_POINTS + widest + _EDGE_POINTS)

    bottom, top = axes.get_ylim()
    wanted = [
        0.0 if label.point is None else (label.point[1] - bottom) / (top - bottom) * height
        for label in labels
    ]
    for label, level in zip(labels, _moved_apart(wanted, _LABEL_GAP_POINTS, height), strict=True):
        _draw_end_label(axes, label, left=1.0 + _LEADER_POINTS / width, level=level / height)


def _end_labels(
    axes: Axes, summaries: Sequence[_Summary], threshold: float | None
) -> list[_EndLabel]:
    """List the labels at the line ends."""
    labels = [
        _EndLabel(
            one.label,
            # Text is thinner than a line and needs a darker tone to read as the same colour.
            _darker(COLOURS[position % len(COLOURS)]),
            (float(one.rounds[-1]), float(one.mean[-1])) if len(one.rounds) else None,
        )
        for position, one in enumerate(summaries)
    ]
    if threshold is not None:
        right_edge = axes.get_xlim()[1]
        labels.append(
            _EndLabel(_threshold_label(threshold), to_rgb(QUIET_INK), (right_edge, threshold))
        )
    return labels


def _darker(colour: str) -> tuple[float, float, float]:
    """Return a colour a little darker."""
    red, green, blue = to_rgb(colour)
    return 0.82 * red, 0.82 * green, 0.82 * blue


def _draw_end_label(axes: Axes, label: _EndLabel, left: float, level: float) -> None:
    """Write a label at a place in axes fractions and lead a thin line to it from its point."""
    axes.annotate(
        label.text,
        (left, level),
        xycoords="axes fraction",
        xytext=(4.0, 0.0),
        textcoords="offset points",
        fontsize=_LABEL_SIZE,
        color=label.colour,
        va="center_baseline",
    )
    if label.point is not None:
        axes.annotate(
            "",
            (left, level),
            xycoords="axes fraction",
            xytext=label.point,
            textcoords="data",
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 2.0,
                "shrinkB": 0.0,
            },
            annotation_clip=False,
        )


def _moved_apart(wanted: Sequence[float], gap: float, room: float) -> list[float]:
    """Return the heights nearest to the wanted ones that keep a gap and stay within the room.

    Least squares: labels that would touch form a group around the mean of their wanted heights.
    """
    gap = min(gap, room / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # With the gaps taken out, the heights need only be in order, which is isotonic regression.
    groups: list[list[float]] = []
    for rank, i in enumerate(order):
        groups.append([wanted[i] - rank * gap])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            touching = groups.pop()
            groups[-1].extend(touching)
    levels = [level for group in groups for level in [fmean(group)] * len(group)]
    highest = room - (len(wanted) - 1) * gap
    placed = [0.0] * len(wanted)
    for rank, (i, level) in enumerate(zip(order, levels, strict=True)):
        placed[i] = min(max(level, 0.0), highest) + rank * gap
    return placed


def _add_legend(figure: Figure, axes: Axes, entries: Sequence[tuple[float, str, Line2D]]) -> None:
    """Name the curves in a legend beside the axes, ordered by the height at which they end."""
    ordered = sorted(entries, key=lambda entry: entry[0], reverse=True)
    legend = axes.legend(
        [line for _, _, line in ordered],
        [label for _, label, _ in ordered],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=3.6,
        labelspacing=0.3,
        fontsize=8.0,
        frameon=False,
        ncols=math.ceil(len(ordered) / _LEGEND_ROWS),
    )
    legend_width = legend.get_window_extent().width * _POINTS_PER_PIXEL
    axes_width, _ = _fit(figure, axes, right=_LEADER_POINTS + legend_width + _EDGE_POINTS)
    legend.set_bbox_to_anchor((1.0 + _LEADER_POINTS / axes_width, 1.0), transform=axes.transAxes)


def _fit(figure: Figure, axes: Axes, right: float) -> tuple[float, float]:
    """Size the axes so that all around them fits the figure.

    Args:
        figure: The figure, which grows in width if the axes would become too narrow.
        axes: The axes, with ticks and labels in place.
        right: Points to leave free on the right.

    Returns:
        Width and height of the axes in points.
    """
    inner = axes.get_window_extent()
    boxes = [axis.get_tightbbox() for axis in (axes.xaxis, axes.yaxis)]
    outer = [box for box in boxes if box is not None]
    left = (inner.x0 - min(box.x0 for box in outer)) * _POINTS_PER_PIXEL + _EDGE_POINTS
    below = (inner.y0 - min(box.y0 for box in outer)) * _POINTS_PER_PIXEL + _EDGE_POINTS
    title_lines = 1 + axes.get_title(loc="left").count("\n")
    above = _CAPTION_POINTS + _TITLE_LINE_POINTS * title_lines + _EDGE_POINTS

    figure_width, figure_height = (inches * _POINTS_PER_INCH for inches in _FIGURE_INCHES)
    width = max(figure_width - left - right, _NARROWEST_AXES_POINTS)
    height = figure_height - below - above
    figure_width = left + width + right
    figure.set_size_inches(figure_width / _POINTS_PER_INCH, figure_height / _POINTS_PER_INCH)
    axes.set_position(
        (left / figure_width, below / figure_height, width / figure_width, height / figure_height)
    )
    return width, height


def _text_width(axes: Axes, text: str) -> float:
    """Return the width of an end label in points."""
    probe = axes.text(0.0, 0.0, text, fontsize=_LABEL_SIZE)
    width = probe.get_window_extent().width * _POINTS_PER_PIXEL
    probe.remove()
    return float(width)
