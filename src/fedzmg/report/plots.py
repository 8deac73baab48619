"""Figures of a study for print, in the style of :mod:`fedzmg.report.figures`."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fedzmg.report.figures import COLOURS, DASHES, GRID, PNG_DPI, QUIET_INK, STYLE, Series, curves
from fedzmg.report.outcome import Outcome, Score
from fedzmg.report.panels import panels

MOST_IN_ONE_PANEL = 10
# Whatever a file says of its making would differ from day to day or from version to version.
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def rendered(figure: Figure, suffix: str) -> bytes:
    """The content of a PNG, SVG or PDF file."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "pdf.fonttype": 42}):
        figure.savefig(buffer, format=suffix, dpi=PNG_DPI, metadata=_METADATA[suffix])
    return buffer.getvalue()


def study_figures(outcome: Outcome) -> Iterator[tuple[str, Figure]]:
    """Every figure of a study with the name of its file."""
    drawn = [score for score in outcome.scores if score.curve is not None]
    if drawn:
        yield "curves", _learning(outcome)
        yield "traffic", _against_traffic(outcome, drawn)
    finished = [s for s in outcome.ranked if all(map(math.isfinite, s.finals.values()))]
    if finished:
        yield "seeds", _seeds(outcome, finished)


def _learning(outcome: Outcome) -> Figure:
    study = outcome.study
    series = []
    for label, runs in study.members.items():
        shared = sorted(set.intersection(*(set(run.log.evaluated) for run in runs)))
        values = [dict(zip(run.log.evaluated, run.log.metrics, strict=True)) for run in runs]
        if not shared:
            continue
        table = [
            [own[r] if run.diverged is None or r < run.diverged else math.nan for r in shared]
            for run, own in zip(runs, values, strict=True)
        ]
        series.append(Series(label, np.array(shared), np.array(table)))
    draw = curves if len(series) <= MOST_IN_ONE_PANEL else panels
    return draw(
        series,
        title=f"{study.name}, {_seed_words(outcome)}",
        ylabel=f"test {study.metric}",
        threshold=study.threshold,
    )


def _seed_words(outcome: Outcome) -> str:
    seeds = len({run.seed for run in outcome.study.runs})
    return "1 seed" if seeds == 1 else f"{seeds} seeds"


def _canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=100.0, facecolor="white")
    figure.set_layout_engine(ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=11.0, fontweight="bold")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _laid_out(figure: Figure) -> Figure:
    """Lay a figure out once; otherwise every file that is saved does it again."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    return figure


def _against_traffic(outcome: Outcome, drawn: Sequence[Score]) -> Figure:
    study = outcome.study
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(7.0, 4.2, f"{study.name}, by traffic")
        for i, score in enumerate(drawn):
            assert score.curve is not None
            axes.plot(
                score.curve.mib, score.curve.mean, color=COLOURS[i % len(COLOURS)],
                linestyle=DASHES[i % len(DASHES)], linewidth=1.5, label=score.label,
            )  # fmt: skip
        if study.threshold is not None:
            axes.axhline(study.threshold, color=QUIET_INK, linestyle=(0, (1.0, 2.2)), linewidth=1.0)
        axes.grid(color=GRID, linewidth=0.7)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("MiB moved, all clients, both ways")
        axes.set_ylabel(f"test {study.metric}")
        # Beside the axes, where it covers nothing.
        figure.legend(
            loc="outside right upper", fontsize=7.5, frameon=False, handlelength=3.2,
            ncols=math.ceil(len(drawn) / 22),
        )  # fmt: skip
        return _laid_out(figure)


def _seeds(outcome: Outcome, finished: Sequence[Score]) -> Figure:
    study = outcome.study
    position = {score.label: i for i, score in enumerate(outcome.scores)}
    with matplotlib.rc_context(STYLE):
        figure, axes = _canvas(
            7.0, 1.3 + 0.3 * len(finished), f"{study.name}: final {study.metric} of every seed"
        )
        seeds = sorted({seed for score in finished for seed in score.finals})
        if len(finished) <= MOST_IN_ONE_PANEL:
            for seed in seeds:
                pairs = [(s.finals[seed], y) for y, s in enumerate(finished) if seed in s.finals]
                axes.plot(*zip(*pairs, strict=True), color="#BBBBBB", linewidth=0.7, zorder=1)
        for y, score in enumerate(finished):
            colour = COLOURS[position[score.label] % len(COLOURS)]
            values = list(score.finals.values())
            axes.plot(values, [y] * len(values), "o", color=colour, markersize=4.5, zorder=3)
            axes.plot([score.mean or 0.0], [y], "|", color=colour, markersize=15, markeredgewidth=2)
        axes.set_yticks(range(len(finished)), [s.label.replace("$", r"\$") for s in finished])
        axes.set_ylim(len(finished) - 0.4, -0.6)
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.set_xlabel(f"final {study.metric}")
        return _laid_out(figure)
