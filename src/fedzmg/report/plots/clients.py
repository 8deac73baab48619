"""Figures about single clients for print."""

from __future__ import annotations

import math
from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import ArrayLike

from fedzmg.report.plots.legends import add_legend_outside, add_title
from fedzmg.report.plots.style import COLOURS, DASHES, DOTTED, GRID, QUIET_INK, STYLE, laid_out
from fedzmg.results.formatting import INDEX_EXPLAINED
from fedzmg.results.over_clients import (
    SHARES,
    Bands,
    loss_spreads,
    metric_spreads,
    sorted_averages,
)
from fedzmg.results.study_result import StudyResult

MOST_WITH_FULL_BANDS = 8


def sorted_clients(outcome: StudyResult) -> Figure | None:
    """The metric of every client, worst first."""
    study, found = outcome.study, sorted_averages(outcome.study)
    if not found:
        return None
    style = {label: i for i, label in enumerate(study.members)}
    with matplotlib.rc_context(STYLE):
        title = f"{study.name}: {study.metric} of every client, worst first"
        figure, axes = _canvas(
            title, "clients, in percent", f"{study.metric} on their own examples"
        )
        for label, one in found.items():
            x, colour = 100.0 * SHARES, COLOURS[style[label] % len(COLOURS)]
            _plot(axes, label, style[label], x, one.mean)
            if one.band is not None:
                low, high, _ = one.band
                axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0.0)
        for level in study.thresholds:
            axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=1.0)
        axes.set_xlim(0.0, 100.0)
        return _named(figure)


def losses(outcome: StudyResult) -> Figure | None:
    """Training losses over the clients of a round."""
    title = f"{outcome.study.name}: training loss, median and 10 to 90 % of a cohort"
    return _banded(outcome, loss_spreads(outcome.study), title, "mean local loss")


def metric_by_round(outcome: StudyResult) -> Figure | None:
    """The metric over clients by round."""
    study = outcome.study
    title = f"{study.name}: {study.metric}, median and 10 to 90 % of the clients"
    return _banded(outcome, metric_spreads(study), title, f"{study.metric} on their own examples")


def _banded(
    outcome: StudyResult, found: Mapping[str, Bands], title: str, ylabel: str
) -> Figure | None:
    if not found:
        return None
    style = {label: i for i, label in enumerate(outcome.study.members)}
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(title, INDEX_EXPLAINED, ylabel)
        for label, one in found.items():
            colour = COLOURS[style[label] % len(COLOURS)]
            _plot(axes, label, style[label], one.indices, one.middle)
            faint = 0.12 if len(found) <= MOST_WITH_FULL_BANDS else 0.03
            axes.fill_between(
                one.indices, one.low, one.high, color=colour, alpha=faint, linewidth=0.0
            )
        axes.set_xlim(left=0.0)
        return _named(figure)


def _plot(axes: Axes, label: str, style: int, x: ArrayLike, y: ArrayLike) -> None:
    axes.plot(
        x, y, color=COLOURS[style % len(COLOURS)], linestyle=DASHES[style % len(DASHES)],
        linewidth=1.5, label=label.replace("$", r"\$"),
    )  # fmt: skip


def _canvas(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, 4.2), dpi=100.0, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    add_title(figure, title)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _named(figure: Figure) -> Figure:
    """Put the names outside the axes and lay the figure out."""
    add_legend_outside(figure, columns=math.ceil(len(figure.axes[0].get_lines()) / 22))
    return laid_out(figure)
