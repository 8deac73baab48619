"""Figures of a study for print, in the style of :mod:`fedzmg.report.plots.style`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedzmg.report.plots import clients as client_plots
from fedzmg.report.plots.figures import curves
from fedzmg.report.plots.legends import add_legend_outside, add_title, row_name
from fedzmg.report.plots.panels import panels
from fedzmg.report.plots.series import Average
from fedzmg.report.plots.style import COLOURS, DASHES, DOTTED, GRID, QUIET_INK, STYLE, laid_out
from fedzmg.results.averaging import possible
from fedzmg.results.formatting import INDEX_EXPLAINED, count_text
from fedzmg.results.study_result import StudyResult

MOST_IN_ONE_PANEL = 10


def study_figures(outcome: StudyResult) -> Iterator[tuple[str, Figure]]:
    """Every figure of a study with the name of its file."""
    for name, make in FIGURES.items():
        figure = make(outcome)
        if figure is not None:
            yield name, figure


def _learning(outcome: StudyResult) -> Figure | None:
    study = outcome.study
    averages = [
        Average(
            score.shown_label, curve.indices, curve.mean, curve.spread, curve.averaged,
            curve.broke_off,
        )
        for score in outcome.scores
        if (curve := score.curve) is not None
    ]  # fmt: skip
    if not averages:
        return None
    seeds = count_text(len({run.seed for run in study.runs}), "seed")
    draw = curves if len(averages) <= MOST_IN_ONE_PANEL else panels
    return draw(
        averages,
        title=f"{study.name}, {seeds}",
        ylabel=f"test {study.metric}",
        threshold=study.thresholds,
        xlabel=INDEX_EXPLAINED,
        possible=possible(study.metric),
    )


def _canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=100.0, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    add_title(figure, title)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain(text: str) -> str:
    """Words that are not taken for a formula."""
    return text.replace("$", r"\$")


def _against_traffic(outcome: StudyResult) -> Figure | None:
    study = outcome.study
    drawn = [(score.label, curve) for score in outcome.scores if (curve := score.curve)]
    if not drawn:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(7.0, 4.2, f"{study.name}, by traffic")
        for i, (label, curve) in enumerate(drawn):
            axes.plot(
                curve.mib, curve.mean, color=COLOURS[i % len(COLOURS)],
                linestyle=DASHES[i % len(DASHES)], linewidth=1.5, label=_plain(label),
            )  # fmt: skip
        for level in study.thresholds:
            axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=1.0)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("MiB moved, all clients, both ways")
        axes.set_ylabel(f"test {study.metric}")
        add_legend_outside(figure, columns=math.ceil(len(drawn) / 22))
        return laid_out(figure)


def _seeds(outcome: StudyResult) -> Figure | None:
    study = outcome.study
    finished = [s for s in outcome.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finished:
        return None
    position = {score.label: i for i, score in enumerate(outcome.scores)}
    with matplotlib.rc_context(STYLE):
        title = f"{study.name}: final {study.metric} of every seed"
        names = [_plain("\n".join(row_name(score.label, 7.0))) for score in finished]
        lines = 1 + max(name.count("\n") for name in names)
        pitch = 0.3 if lines == 1 else 0.1 + 0.15 * lines
        figure, axes = _canvas(7.0, 1.3 + pitch * len(finished), title)
        if len(finished) <= MOST_IN_ONE_PANEL:
            for seed in sorted({seed for score in finished for seed in score.finals}):
                pairs = [(s.finals[seed], y) for y, s in enumerate(finished) if seed in s.finals]
                axes.plot(*zip(*pairs, strict=True), color="#BBBBBB", linewidth=0.7, zorder=1)
        for y, score in enumerate(finished):
            colour = COLOURS[position[score.label] % len(COLOURS)]
            values = list(score.finals.values())
            axes.plot(values, [y] * len(values), "o", color=colour, markersize=4.5, zorder=3)
            axes.plot([score.mean or 0.0], [y], "|", color=colour, markersize=15, markeredgewidth=2)
        axes.set_yticks(range(len(finished)), names)
        axes.set_ylim(len(finished) - 0.4, -0.6)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_xlabel(f"final {study.metric}")
        return laid_out(figure)


FIGURES: dict[str, Callable[[StudyResult], Figure | None]] = {
    "curves": _learning,
    "traffic": _against_traffic,
    "seeds": _seeds,
    "clients": client_plots.sorted_clients,
    "clients-by-round": client_plots.metric_by_round,
    "client-loss": client_plots.losses,
}
