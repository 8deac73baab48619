"""Heat-maps of a grid of hyper-parameters, from its ``grid.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from fedzmg.report.lettering import folded, width_of
from fedzmg.report.plots import headings
from fedzmg.report.plots.style import PNG_DPI, QUIET_INK, STYLE
from fedzmg.results.formatting import is_share, value_text
from fedzmg.results.grids import Field, field, limits_of

# One hue from paper to ink: order is plain in print and under any colour blindness.
_COLOURS = LinearSegmentedColormap.from_list(
    "scores", ["#F4F8FB", "#CFE3EF", "#8FC1DC", "#4497C4", "#0072B2", "#083C66"]
)
_DIVERGED = "#EFEBE6"
_BEST = "#D55E00"
_CELL_INCHES = 0.46
_NUMBERED_CELLS = 14
"""Along the longer side: with more cells, numbers no longer fit into them."""
_TITLE_SIZE = 10.5
_TITLE_PITCH = 0.18
"""Inches that a further line of the title adds."""
_ABOVE_AND_BELOW = 0.09
"""Inches that every panel keeps clear."""
_NARROWEST = 0.9
"""Share of its inches that a cell keeps at least."""
_ATTEMPTS = 5
"""To fold words: folded ones move the panels a little, and with them the room."""
_PASSES = 3
"""Of the layout, until nothing moves by more than a pixel or two."""
_WORDS = {"client.lr": "client learning rate", "server.lr": "server learning rate"}


def figure(data: Mapping[str, Any], name: str) -> Figure:
    """The heat-map of one algorithm of a grid.

    Args:
        data: what ``grid.json`` holds.
        name: the algorithm, as in the grid.
    """
    return figures(data, [name])


def figures(data: Mapping[str, Any], names: Sequence[str] | None = None) -> Figure:
    """Heat-maps side by side on one scale of colours.

    Words that have no room beside each other are folded, and the figure is so much higher.

    Args:
        data: what ``grid.json`` holds.
        names: the algorithms; by default all of the grid.
    """
    chosen = data["algorithms"] if names is None else names
    entries = [data["algorithms"][name] for name in chosen]
    maps = [(one, field(one, higher_is_better=data["higher_is_better"])) for one in entries]
    whole = lines = [_words(data, *one) for one in maps]
    # Panels may move apart for their notes, but not for one that is wider than a panel.
    narrow = max(width_of(own.note[0], headings.NOTE) for own in whole) > 72 * _panel_inches(maps)
    for _ in range(_ATTEMPTS):
        sheet = _sheet(data, maps, lines, narrow=narrow)
        # Only what is drawn tells what room there is.
        _lay_out(sheet.figure)
        if _settled(sheet):
            break
        if narrow:
            found = headings.rooms(*sheet)
            lines = [own.within(room) for own, room in zip(whole, found, strict=True)]
        narrow = True
    sheet.figure.set_layout_engine("none")
    return sheet.figure


class _Sheet(NamedTuple):
    """A figure and what stands in it."""

    figure: Figure
    panels: list[headings.Panel]
    scale: Axes


def _lay_out(figure: Figure) -> None:
    """Find every part its place; each pass sees what square cells made of the one before."""
    figure.set_dpi(PNG_DPI)
    for _ in range(_PASSES):
        figure.draw_without_rendering()


def _settled(sheet: _Sheet) -> bool:
    """Whether all words of a figure that was laid out have room, and the cells kept theirs."""
    # Wide notes push panels apart, at the cost of their cells.
    cells = headings.narrowest_cell(sheet.figure, sheet.panels)
    return headings.have_room(*sheet) and cells >= _NARROWEST * _CELL_INCHES


def _sheet(
    data: Mapping[str, Any],
    maps: Sequence[tuple[Mapping[str, Any], Field]],
    words: Sequence[headings.Words],
    *,
    narrow: bool = False,
) -> _Sheet:
    """Draw heat-maps.

    Args:
        data: what ``grid.json`` holds.
        maps: the algorithms and their scores.
        words: around each.
        narrow: whether notes are folded, so that panels need not make room for them.
    """
    fields = [one for _, one in maps]
    low, high = limits_of(fields)
    if high == low:
        low, high = low - 0.5, high + 0.5
    across = min(len(fields), 4)
    down = -(-len(fields) // across)
    height = max(2.2, _CELL_INCHES * max(len(f.row_values) for f in fields) + 1.25)
    wide = across * _panel_inches(maps) + 0.9
    title = _title(data, wide)
    more = sum(
        max(own.more_inches for own in words[i : i + across])
        for i in range(0, len(words), across)
    ) + _TITLE_PITCH * (len(title) - 2)  # fmt: skip
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(h_pad=_ABOVE_AND_BELOW)
        canvas = Figure(figsize=(wide, down * height + 0.75 + more), layout=layout)
        FigureCanvasAgg(canvas)
        grid = canvas.subplots(down, across, squeeze=False)
        drawn: Any = None
        panels = []
        for i, (axes, (entry, one), own) in enumerate(zip(grid.flat, maps, words, strict=False)):
            drawn = _draw_cells(axes, data, one, low, high)
            _mark_best(axes, entry, one)
            panels.append(_dress(axes, i % across, one, own))
            panels[-1].note.set_in_layout(not narrow)
        for axes in grid.flat[len(fields) :]:
            axes.set_visible(False)
        bar = canvas.colorbar(
            drawn, ax=list(grid.flat[: len(fields)]), pad=0.02, fraction=0.04, aspect=28
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7, length=2)
        if is_share(data["metric"]):
            bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
        canvas.suptitle(
            headings.plain(title), x=0.01, ha="left", fontsize=_TITLE_SIZE, fontweight="bold"
        )
    return _Sheet(canvas, panels, bar.ax)


def _panel_inches(maps: Sequence[tuple[Mapping[str, Any], Field]]) -> float:
    """Width of a heat-map with what is beside it."""
    return max(3.6, _CELL_INCHES * max(len(one.column_values) for _, one in maps) + 1.1)


def _title(data: Mapping[str, Any], inches: float) -> list[str]:
    """Lines of the title of a figure so wide."""
    remark = f" ({data['label']})" if data["label"] else ""
    half = "tuning half" if data["selection"] == "tune" else "whole test set"
    lines = (
        f"{data['task']}{remark}: {data['metric']} on the {half},",
        f"mean after each of the last {data['last']} of {data['rounds']} rounds",
    )
    room = 0.97 * 72.0 * inches
    return [part for own in lines for part in folded(own, room, _TITLE_SIZE, bold=True, cut=True)]


def _words(data: Mapping[str, Any], entry: Mapping[str, Any], one: Field) -> headings.Words:
    """What is written around a heat-map, each in one line."""
    best = entry["best"]
    note = "every point diverged"
    if best is not None:
        note = f"best {value_text(best['score'], data['metric'])} at " + ", ".join(
            f"{key.removesuffix('.lr')} {value:.3g}" for key, value in best["options"].items()
        )
        note += " (border)" if best["border"] else ""
        note += "; x diverged" if one.diverged.any() else ""
        note += "; - stopped" if one.stopped.any() else ""
    below = _WORDS.get(one.columns, one.columns)
    if one.others:
        below += f"; best over {', '.join(one.others)}"
    return headings.Words((entry["label"],), (note,), (below,))


def _draw_cells(axes: Axes, data: Mapping[str, Any], one: Field, low: float, high: float) -> Any:
    image = np.ma.masked_where(one.diverged | ~np.isfinite(one.scores), one.scores)
    colours = _COLOURS if data["higher_is_better"] else _COLOURS.reversed()
    drawn = axes.imshow(
        image, origin="lower", cmap=colours, vmin=low, vmax=high, interpolation="nearest",
        aspect="equal",
    )  # fmt: skip
    axes.set_facecolor(_DIVERGED)
    numbered = max(image.shape) <= _NUMBERED_CELLS
    for (row, column), score in np.ndenumerate(one.scores):
        if one.diverged[row, column]:
            axes.plot(column, row, marker="x", color="#A59C91", markersize=4.5, markeredgewidth=1.0)
        elif one.stopped[row, column]:
            axes.plot(column, row, marker="_", color="#A59C91", markersize=6, markeredgewidth=1.2)
        elif numbered and math.isfinite(score):
            depth = (score - low) / (high - low)
            dark = depth > 0.55 if data["higher_is_better"] else depth < 0.45
            axes.text(
                column, row, _cell_text(score, data["metric"]), ha="center", va="center",
                fontsize=6.8, color="white" if dark else "#222222",
            )  # fmt: skip
    return drawn


def _mark_best(axes: Axes, entry: Mapping[str, Any], one: Field) -> None:
    best = entry["best"]
    if best is None:
        return
    row, column = one.place(best["options"])
    axes.add_patch(
        Rectangle(
            (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=_BEST, linewidth=2.0,
            clip_on=False, zorder=5,
        )
    )  # fmt: skip


def _dress(axes: Axes, column: int, one: Field, words: headings.Words) -> headings.Panel:
    """Write what stands around the cells, and draw seams between them."""
    title = axes.set_title(
        headings.plain(words.title), loc="left", fontsize=headings.TITLE, fontweight="bold",
        pad=words.pad,
    )  # fmt: skip
    note = axes.annotate(
        headings.plain(words.note), (0.0, 1.0), xycoords="axes fraction", xytext=(0, 3.5),
        textcoords="offset points", fontsize=headings.NOTE, color=QUIET_INK, va="bottom",
    )  # fmt: skip
    axes.set_xticks(range(len(one.column_values)), _ticks(one.column_values), fontsize=7)
    axes.set_yticks(
        range(len(one.row_values)), _ticks(one.row_values) if one.rows else [""], fontsize=7
    )
    axes.set_xlabel(headings.plain(words.below), fontsize=headings.BELOW)
    if one.rows:
        axes.set_ylabel(_WORDS.get(one.rows, one.rows), fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # White seams between the cells.
    axes.set_xticks(np.arange(-0.5, len(one.column_values)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(one.row_values)), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="minor", length=0)
    return headings.Panel(axes, column, title, note)


def _cell_text(score: float, metric: str) -> str:
    return f"{100 * score:.1f}" if is_share(metric) else f"{score:.2g}"


def _ticks(values: Sequence[float]) -> list[str]:
    """Powers of ten as such, half decades with their exponent, anything else as it is.

    >>> _ticks([0.001, 10**-2.5, 1.0]), _ticks([0.9, 0.99])
    (['$10^{-3}$', '$10^{-2.5}$', '$10^{0}$'], ['0.9', '0.99'])
    """
    halves = [2 * math.log10(v) if v > 0 else math.nan for v in values]
    if all(abs(h - round(h)) < 1e-3 for h in halves):
        return [f"$10^{{{round(h) / 2:g}}}$" for h in halves]
    return [f"{v:.3g}" for v in values]
