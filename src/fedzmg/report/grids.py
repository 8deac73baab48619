"""A grid of hyper-parameters, from its ``grid.json``: heat-maps."""

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
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from fedzmg.report.plots.style import QUIET_INK, STYLE
from fedzmg.report.terminal.tables import metric_text

# One hue from paper to ink: order is plain in print and under any colour blindness.
_COLOURS = LinearSegmentedColormap.from_list(
    "scores", ["#F4F8FB", "#CFE3EF", "#8FC1DC", "#4497C4", "#0072B2", "#083C66"]
)
_DIVERGED = "#EFEBE6"
_BEST = "#D55E00"
_CELL_INCHES = 0.46
_NUMBERED_CELLS = 14
"""Along the longer side: with more cells, numbers no longer fit into them."""
_WORDS = {"client.lr": "client learning rate", "server.lr": "server learning rate"}


class Field(NamedTuple):
    """Two axes of a grid and the scores over them."""

    rows: str
    """Option of the vertical axis; empty if there is one axis only."""
    columns: str
    row_values: list[float]
    column_values: list[float]
    scores: NDArray[np.float64]
    """``[rows, columns]``; over further axes the best."""
    diverged: NDArray[np.bool_]
    others: list[str]
    """Axes that are not shown."""
    stopped: NDArray[np.bool_]
    """Where nothing was trained to its end, so that there is no score."""


def field(entry: Mapping[str, Any], *, higher_is_better: bool = True) -> Field:
    """The scores of one algorithm, laid out over its first two axes: server up, client across."""
    axes: Mapping[str, list[float]] = entry["axes"]
    keys = list(axes)
    columns = keys[0]
    rows = keys[1] if len(keys) > 1 else ""
    row_values = list(axes[rows]) if rows else [0.0]
    shape = (len(row_values), len(axes[columns]))
    worst = -math.inf if higher_is_better else math.inf
    scores = np.full(shape, worst)
    diverged = np.ones(shape, dtype=bool)
    stopped = np.zeros(shape, dtype=bool)
    for point in entry["points"]:
        where = (
            row_values.index(point["options"][rows]) if rows else 0,
            axes[columns].index(point["options"][columns]),
        )
        value = point["score"]
        if not point["diverged"]:
            diverged[where] = False
        stopped[where] |= value is None and "stopped" in point
        if value is not None and (value > scores[where]) == higher_is_better:
            scores[where] = value
    stopped &= ~np.isfinite(scores)
    values = row_values, list(axes[columns])
    return Field(rows, columns, *values, scores, diverged & ~stopped, keys[2:], stopped)


def limits_of(fields: Sequence[Field]) -> tuple[float, float]:
    """Lowest and highest score of several algorithms, for one scale of colours."""
    shown = [f.scores[~f.diverged & np.isfinite(f.scores)] for f in fields]
    values = np.concatenate(shown) if shown else np.array([])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def figure(data: Mapping[str, Any], name: str) -> Figure:
    """The heat-map of one algorithm of a grid.

    Args:
        data: what ``grid.json`` holds.
        name: the algorithm, as in the grid.
    """
    return figures(data, [name])


def figures(data: Mapping[str, Any], names: Sequence[str] | None = None) -> Figure:
    """Heat-maps side by side on one scale of colours.

    Args:
        data: what ``grid.json`` holds.
        names: the algorithms; by default all of the grid.
    """
    chosen = list(data["algorithms"]) if names is None else list(names)
    higher = data["higher_is_better"]
    fields = [field(data["algorithms"][name], higher_is_better=higher) for name in chosen]
    low, high = limits_of(fields)
    if high == low:
        low, high = low - 0.5, high + 0.5
    across = min(len(fields), 4)
    down = -(-len(fields) // across)
    width = max(3.6, _CELL_INCHES * max(len(f.column_values) for f in fields) + 1.1)
    height = max(2.2, _CELL_INCHES * max(len(f.row_values) for f in fields) + 1.25)
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(across * width + 0.9, down * height + 0.55), layout="constrained")
        FigureCanvasAgg(canvas)
        grid = canvas.subplots(down, across, squeeze=False)
        drawn: Any = None
        for axes, name, one in zip(grid.flat, chosen, fields, strict=False):
            drawn = _draw(axes, data, data["algorithms"][name], one, low, high)
        for axes in grid.flat[len(fields) :]:
            axes.set_visible(False)
        bar = canvas.colorbar(
            drawn, ax=list(grid.flat[: len(fields)]), pad=0.02, fraction=0.04, aspect=28
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=7, length=2)
        if data["metric"] == "accuracy":
            bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
        canvas.suptitle(_title(data), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    return canvas


def _title(data: Mapping[str, Any]) -> str:
    remark = f" ({data['label']})" if data["label"] else ""
    half = "tuning half" if data["selection"] == "tune" else "whole test set"
    return (
        f"{data['task']}{remark}: {data['metric']} on the {half},\nmean after each of the last "
        f"{data['last']} of {data['rounds']} rounds"
    )


def _draw(
    axes: Axes,
    data: Mapping[str, Any],
    entry: Mapping[str, Any],
    one: Field,
    low: float,
    high: float,
) -> Any:
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
    best = entry["best"]
    words = "every point diverged"
    if best is not None:
        column = one.column_values.index(best["options"][one.columns])
        row = one.row_values.index(best["options"][one.rows]) if one.rows else 0
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=_BEST, linewidth=2.0,
                clip_on=False, zorder=5,
            )
        )  # fmt: skip
        words = f"best {metric_text(best['score'], data['metric'])} at " + ", ".join(
            f"{key.removesuffix('.lr')} {value:.3g}" for key, value in best["options"].items()
        )
        words += " (border)" if best["border"] else ""
    axes.set_title(entry["label"], loc="left", fontsize=9.5, fontweight="bold", pad=17)
    if best is not None:
        words += "; x diverged" if one.diverged.any() else ""
        words += "; - stopped" if one.stopped.any() else ""
    axes.annotate(
        words, (0.0, 1.0), xycoords="axes fraction", xytext=(0, 3.5), textcoords="offset points",
        fontsize=7.2, color=QUIET_INK, va="bottom",
    )  # fmt: skip
    axes.set_xticks(range(len(one.column_values)), _ticks(one.column_values), fontsize=7)
    axes.set_yticks(
        range(len(one.row_values)), _ticks(one.row_values) if one.rows else [""], fontsize=7
    )
    axes.set_xlabel(_WORDS.get(one.columns, one.columns), fontsize=8.5)
    if one.rows:
        axes.set_ylabel(_WORDS.get(one.rows, one.rows), fontsize=8.5)
    if one.others:
        axes.set_xlabel(f"{axes.get_xlabel()}; best over {', '.join(one.others)}", fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # White seams between the cells.
    axes.set_xticks(np.arange(-0.5, image.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, image.shape[0]), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="minor", length=0)
    return drawn


def _cell_text(score: float, metric: str) -> str:
    return f"{100 * score:.1f}" if metric == "accuracy" else f"{score:.2g}"


def _ticks(values: Sequence[float]) -> list[str]:
    """Powers of ten as such, half decades with their exponent, anything else as it is.

    >>> _ticks([0.001, 10**-2.5, 1.0]), _ticks([0.9, 0.99])
    (['$10^{-3}$', '$10^{-2.5}$', '$10^{0}$'], ['0.9', '0.99'])
    """
    halves = [2 * math.log10(v) if v > 0 else math.nan for v in values]
    if all(abs(h - round(h)) < 1e-3 for h in halves):
        return [f"$10^{{{round(h) / 2:g}}}$" for h in halves]
    return [f"{v:.3g}" for v in values]
