"""Heat maps of a grid of hyper-parameters, from its ``grid.json``."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, format_axis, styled, wrapped
from fedzmg.results.formatting import is_share, options_text, value_text
from fedzmg.results.reading import name_of

# One hue from light to dark: the order is plain in print and under any colour blindness.
_SHADES = LinearSegmentedColormap.from_list(
    "scores", ["#f4f8fb", "#cfe3ef", "#8fc1dc", "#4497c4", "#0072b3", "#083c66"]
)
_DIVERGED, _MARK = "#efebe6", "#8f867b"
_DARK_TEXT, _LIGHT_TEXT = "#232323", "#fefefe"  # the page must keep them in dark mode
_CELL_INCHES = 0.5
_NUMBERED_CELLS = 14  # cells along the longer side up to which every cell shows its number


class Field(NamedTuple):
    """Scores of an algorithm over two axes of a grid."""

    rows: str  # option of the vertical axis; empty if there is one axis only
    columns: str
    row_values: list[float]
    column_values: list[float]
    scores: NDArray[np.float64]  # [rows, columns], best over further axes; not finite: none
    marks: NDArray[np.str_]  # x: all trials of the point diverged; _: stopped early
    others: list[str]

    def position(self, options: Mapping[str, float]) -> tuple[int, int]:
        row = self.row_values.index(options[self.rows]) if self.rows else 0
        return row, self.column_values.index(options[self.columns])


def field(entry: Mapping[str, Any], *, higher_is_better: bool = True) -> Field:
    """Arrange the scores of an algorithm over its first two axes: server up, client across."""
    axes: Mapping[str, list[float]] = entry["axes"]
    columns, rows, *others = [*axes, ""] if len(axes) == 1 else axes
    values = list(axes.get(rows, [0.0])), list(axes[columns])
    worst, better = (-np.inf, max) if higher_is_better else (np.inf, min)
    size = [*map(len, values)]
    found = Field(rows, columns, *values, np.full(size, worst), np.full(size, "~"), others)
    for point in entry["points"]:
        at, score = found.position(point["options"]), point["score"]
        mark = "x" if point["diverged"] else "_" if score is None and "stopped" in point else ""
        found.marks[at] = min(found.marks[at], mark)  # one trained point makes a cell
        if score is not None and not point["diverged"]:
            found.scores[at] = better(score, found.scores[at])
    found.marks[found.marks == "~"] = ""
    return found


@styled
def heat_maps(grid: Mapping[str, Any], *chosen: str) -> Chart:
    """Draw the scores of algorithms of a grid, by default of all, on the scale of the grid."""
    entries = grid["algorithms"]
    names = chosen or tuple(entries)
    higher = grid["higher_is_better"]
    every = {name: field(one, higher_is_better=higher) for name, one in entries.items()}
    # One scale of colours for all algorithms.
    scores = np.concatenate([one.scores.ravel() for one in every.values()])
    values = scores[np.isfinite(scores)].tolist() or [0.0, 1.0]
    low, high = min(values), max(values)
    if high == low:
        low, high = low - 0.5, high + 0.5
    fields = [every[name] for name in names]
    across = min(len(fields), style.COLUMNS)
    down = -(-len(fields) // across)
    width = max(2.6, _CELL_INCHES * max(len(one.column_values) for one in fields) + 1.0)
    height = _CELL_INCHES * max(len(one.row_values) for one in fields) + 0.75
    words = [_words(grid, entries[name], every[name], int(13.0 * (width - 0.5))) for name in names]
    height += 0.17 * max(sum(1 + text.count("\n") for text in one) for one in words)
    half = "tuning half" if grid["selection"] == "tune" else "whole test set"
    alone = f"{entries[names[0]]['label']} on " if len(entries) > len(names) == 1 else ""
    title = f"{alone}{name_of(grid)}: {grid['metric']} on the {half}, mean after each of the last "
    title += f"{grid['last']} of {grid['rounds']} rounds"
    other, caption = entries[names[0]].get("best_by_test"), ""
    if len(names) == 1 and other is not None:
        caption = f"By all test data, as in the paper: {_point(other, grid['metric'])}."
    chart = Chart(title, caption, (across * width + 1.1, down * height + 0.7))
    panels = chart.body.subplots(down, across, squeeze=False).flat
    for axes in panels[len(fields) :]:
        axes.set_visible(False)
    for axes, name, one, text in zip(panels, names, fields, words, strict=False):
        drawn = _draw_cells(axes, one, grid, low, high)
        _name_cells(axes, one, *text)
        if entries[name]["best"] is not None:
            row, column = one.position(entries[name]["best"]["options"])
            axes.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, clip_on=False, zorder=5,
                          edgecolor=style.COLOURS[1], linewidth=2.2)
            )  # fmt: skip
    bar = chart.body.colorbar(drawn, ax=list(panels[: len(fields)]), pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7.5, length=2)
    format_axis(bar.ax, grid["metric"])
    return chart


def _point(best: Mapping[str, Any], metric: str) -> str:
    return f"{value_text(best['score'], metric)} at {options_text(best['options'], 3)}"


def _words(
    grid: Mapping[str, Any], entry: Mapping[str, Any], one: Field, characters: int
) -> tuple[str, str, str]:
    """Return title, note and name of the horizontal axis of a heat map."""
    best, note = entry["best"], "every point diverged"
    if best is not None:
        note = f"best {_point(best, grid['metric'])}" + " (border)" * best["border"]
        note += "; \u00d7 diverged" * ("x" in one.marks) + "; \u2013 stopped" * ("_" in one.marks)
    below = one.columns + (f"; best over {', '.join(one.others)}" if one.others else "")
    title = wrapped(str(entry["label"]), int(0.75 * characters))
    return title, wrapped(note, characters), wrapped(below, int(0.85 * characters))


def _draw_cells(axes: Axes, one: Field, grid: Mapping[str, Any], low: float, high: float) -> Any:
    higher, share = grid["higher_is_better"], is_share(grid["metric"])
    scores = np.ma.masked_invalid(one.scores)
    edges = [np.arange(size + 1) - 0.5 for size in scores.shape]
    shades = _SHADES if higher else _SHADES.reversed()
    axes.set_facecolor(_DIVERGED)
    lines: dict[str, Any] = {"edgecolors": style.PAPER, "linewidth": 1}
    drawn = axes.pcolormesh(*edges[::-1], scores, cmap=shades, vmin=low, vmax=high, **lines)
    numbered = max(scores.shape) <= _NUMBERED_CELLS
    for (row, column), score in np.ndenumerate(one.scores):
        if mark := str(one.marks[row, column]):
            axes.plot(column, row, marker=mark, color=_MARK, markersize=5)
        elif numbered and math.isfinite(score):
            depth = (score - low) / (high - low)
            ink = _LIGHT_TEXT if (depth if higher else 1.0 - depth) > 0.55 else _DARK_TEXT
            text = f"{100 * score:.1f}" if share else f"{score:.2g}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8.0, color=ink)
    return drawn


def _name_cells(axes: Axes, one: Field, title: str, note: str, xlabel: str) -> None:
    pad = 6.5 + 11.0 * (note.count("\n") + 1)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", pad=pad)
    axes.annotate(
        note, (0.0, 1.0), xycoords="axes fraction", xytext=(0.0, 3.5), fontsize=8.0,
        textcoords="offset points", color=style.QUIET_INK, va="bottom",
    )  # fmt: skip
    rows = [f"{value:.3g}" for value in one.row_values] if one.rows else [""]
    columns = [f"{value:.3g}" for value in one.column_values]
    axes.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axes.set(xlabel=xlabel, ylabel=one.rows, aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
