"""Names at the ends of curves or in a legend, and axes that leave them room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedzmg.report.lettering import folded
from fedzmg.report.placing import moved_apart
from fedzmg.report.plots.series import Average
from fedzmg.report.plots.style import QUIET_INK

FIGURE_INCHES = (7.0, 4.2)
SCREEN_DPI = 100.0
CAPTION_POINTS = 23.0
POINTS_PER_INCH = 72.0
_POINTS_PER_PIXEL = POINTS_PER_INCH / SCREEN_DPI
_NARROWEST_AXES_POINTS = 270.0
_TITLE_LINE_POINTS = 13.0
_LEGEND_ROWS = 21
_LABEL_SIZE = 9.0
_LEGEND_SIZE = 8.0
_LABEL_GAP_POINTS = 12.5
_LINE_POINTS = 11.5
"""What a further line adds to a label."""
_END_LINES = 16
"""As many lines of labels have room beside the axes."""
_FOLDED_POINTS = (200.0, 300.0, 400.0)
"""How wide long labels may be: the first that does not give too many lines."""
_LEADER_POINTS = 16.0
EDGE_POINTS = 8.0


@dataclass(frozen=True)
class _EndLabel:
    """A label beside the axes, and the point it names (None if nothing could be drawn)."""

    text: str
    colour: tuple[float, float, float]
    point: tuple[float, float] | None


def level_words(level: float) -> str:
    """What a threshold is called."""
    return f"threshold {level:g}"


def label_ends(
    figure: Figure, axes: Axes, ends: Sequence[tuple[Average, str]], levels: Sequence[float]
) -> None:
    """Name each curve where it ends, moved apart where the ends are close."""
    labels = _end_labels(axes, ends, levels)
    words = _readable([label.text for label in labels], _LABEL_SIZE, _END_LINES)
    labels = [replace(label, text=own) for label, own in zip(labels, words, strict=True)]
    widest = max(_text_width(axes, label.text) for label in labels)
    width, height = _fit(figure, axes, right=_LEADER_POINTS + widest + EDGE_POINTS)

    bottom, top = axes.get_ylim()
    wanted = [
        0.0 if label.point is None else (label.point[1] - bottom) / (top - bottom) * height
        for label in labels
    ]
    taller = [_LINE_POINTS * label.text.count("\n") for label in labels]
    placed = moved_apart(wanted, _LABEL_GAP_POINTS, height, taller)
    for label, level in zip(labels, placed, strict=True):
        _draw_end_label(axes, label, left=1.0 + _LEADER_POINTS / width, level=level / height)


def _readable(labels: Sequence[str], size: float, most: int) -> list[str]:
    """Fold long labels, to at most so many lines in all; else leave them as they are."""
    for room in _FOLDED_POINTS:
        found = [folded(label, room, size, cut=True) for label in labels]
        if sum(map(len, found)) <= most:
            return ["\n".join(lines) for lines in found]
    return list(labels)


def _end_labels(
    axes: Axes, ends: Sequence[tuple[Average, str]], levels: Sequence[float]
) -> list[_EndLabel]:
    """List the labels at the line ends."""
    labels = [
        _EndLabel(
            one.label,
            # Text is thinner than a line and needs a darker tone to read as the same colour.
            _darker(colour),
            (float(one.rounds[-1]), float(one.mean[-1])) if len(one.rounds) else None,
        )
        for one, colour in ends
    ]
    right_edge = axes.get_xlim()[1]
    labels += [
        _EndLabel(level_words(level), to_rgb(QUIET_INK), (right_edge, level)) for level in levels
    ]
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
        va="center" if "\n" in label.text else "center_baseline",
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


def add_legend(figure: Figure, axes: Axes, entries: Sequence[tuple[float, str, Line2D]]) -> None:
    """Name the curves in a legend beside the axes, ordered by the height at which they end."""
    ordered = sorted(entries, key=lambda entry: entry[0], reverse=True)
    words = _readable([label for _, label, _ in ordered], _LEGEND_SIZE, _LEGEND_ROWS)
    legend = axes.legend(
        [line for _, _, line in ordered],
        words,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=3.6,
        labelspacing=0.3,
        fontsize=_LEGEND_SIZE,
        frameon=False,
        ncols=math.ceil(len(ordered) / _LEGEND_ROWS),
    )
    legend_width = legend.get_window_extent().width * _POINTS_PER_PIXEL
    axes_width, _ = _fit(figure, axes, right=_LEADER_POINTS + legend_width + EDGE_POINTS)
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
    left = (inner.x0 - min(box.x0 for box in outer)) * _POINTS_PER_PIXEL + EDGE_POINTS
    below = (inner.y0 - min(box.y0 for box in outer)) * _POINTS_PER_PIXEL + EDGE_POINTS
    title_lines = 1 + axes.get_title(loc="left").count("\n")
    above = CAPTION_POINTS + _TITLE_LINE_POINTS * title_lines + EDGE_POINTS

    figure_width, figure_height = (inches * POINTS_PER_INCH for inches in FIGURE_INCHES)
    width = max(figure_width - left - right, _NARROWEST_AXES_POINTS)
    height = figure_height - below - above
    figure_width = left + width + right
    figure.set_size_inches(figure_width / POINTS_PER_INCH, figure_height / POINTS_PER_INCH)
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
