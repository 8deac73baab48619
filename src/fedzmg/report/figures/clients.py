"""Spread over single clients, and failures by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedzmg.report.figures.curves import COLUMNS, MOST_IN_ONE_PANEL
from fedzmg.report.figures.rows import Interval, intervals
from fedzmg.report.figures.style import (
    COLOURS,
    DOTTED,
    QUIET_INK,
    Chart,
    format_axis,
    line_style,
    styled,
    usual_range,
    wrapped,
)
from fedzmg.results.formatting import value_text
from fedzmg.results.over_clients import (
    MOST_POINTS,
    SHARES,
    Bands,
    loss_spreads,
    metric_spreads,
    sorted_averages,
)
from fedzmg.results.runs import Run
from fedzmg.results.study_result import StudyResult


@styled
def clients(result: StudyResult) -> Chart | None:
    """Draw the metric of every client, worst first, or one interval per algorithm if many."""
    study, found = result.study, sorted_averages(result.study)
    if not found:
        return None
    if len(found) > MOST_IN_ONE_PANEL:
        rows = []
        for label, one in found.items():
            low, high = sorted((float(one.mean[10]), float(one.mean[90])))
            middle = float(one.mean[50])
            rows.append(
                Interval(label, COLOURS[0], middle, low, high, value_text(middle, study.metric))
            )
        rows.sort(key=lambda row: row.centre, reverse=study.higher_is_better)
        return intervals(
            f"{study.name}: {study.metric} over clients",
            "The median client (its value at the right), and 10 to 90 % of the clients.",
            f"{study.metric} on their own examples",
            rows,
            study.metric,
        )
    better = "higher" if study.higher_is_better else "lower"
    caption = f"Clients from worst to best: the flatter and the {better}, the fairer."
    if any(one.band is not None for one in found.values()):
        caption += " Mean over seeds, with one standard deviation."
    chart = Chart(f"{study.name}: {study.metric} of every client, worst first", caption)
    axes = chart.body.add_subplot()
    x, handles = 100.0 * SHARES, []
    for label, curve in found.items():
        style = line_style(_position(result, label))
        (line,) = axes.plot(x, curve.mean, linewidth=1.6, markevery=12, **style)
        texts = [
            f"{share:g} % of the clients: {value_text(value, study.metric)} or worse"
            for share, value in zip(x.tolist(), curve.mean.tolist(), strict=True)
        ]
        chart.tag(line, label, texts)
        handles.append(line)
        if curve.band is not None:
            below, above, _ = curve.band
            band = axes.fill_between(x, below, above, color=style["color"], alpha=0.14, linewidth=0)
            chart.tag(band, label)
    for level in study.thresholds:
        axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=1.0)
    axes.set_xlim(0.0, 100.0)
    axes.grid()
    axes.set_xlabel("share of the clients, in percent")
    axes.set_ylabel(f"{study.metric} on their own examples")
    format_axis(axes, study.metric)
    chart.name_series(handles, list(found))
    return chart


@styled
def clients_by_round(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the clients' metric by round."""
    study = result.study
    return _banded(
        result,
        metric_spreads(study),
        f"{study.name}: {study.metric} over clients by round",
        "The median client, and the band from 10 to 90 % of the clients; mean over seeds.",
        f"{study.metric} on their own examples",
        study.metric,
    )


@styled
def client_loss(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the training losses of a cohort by round."""
    study = result.study
    joined = max(run.done for run in study.runs) > MOST_POINTS
    over = "seeds and neighbouring rounds" if joined else "seeds"
    return _banded(
        result,
        loss_spreads(study),
        f"{study.name}: training loss over clients by round",
        "The median client of a cohort, and the band from 10 to 90 % of its clients; mean over "
        f"{over}.",
        "mean local loss",
        "loss",
    )


def _banded(
    result: StudyResult,
    found: Mapping[str, Bands],
    title: str,
    caption: str,
    ylabel: str,
    metric: str,
) -> Chart | None:
    if not found:
        return None
    if len(found) > MOST_IN_ONE_PANEL:
        rows = -(-len(found) // COLUMNS)
        chart = Chart(title, caption, (2.5 * COLUMNS, 1.5 * rows + 0.8))
        grid = chart.body.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for axes, (label, bands) in zip(grid.flat, found.items(), strict=False):
            _draw_band(chart, axes, label, bands, 0, metric)
            axes.set_title(wrapped(label, 36), loc="left", fontsize=8.0, pad=3)
            axes.tick_params(labelsize=7)
        for axes in grid.flat[len(found) :]:
            axes.set_visible(False)
        chart.body.supxlabel("round", fontsize=9.0)
        chart.body.supylabel(ylabel, fontsize=9.0)
    else:
        chart = Chart(title, caption)
        axes = chart.body.add_subplot()
        for label, bands in found.items():
            _draw_band(chart, axes, label, bands, _position(result, label), metric)
        axes.set_xlabel("round")
        axes.set_ylabel(ylabel)
        chart.name_series(axes.get_lines(), list(found))
    chart.axes[0].set_xlim(left=0.0)
    limits = usual_range(edge for bands in found.values() for edge in (*bands.low, *bands.high))
    if limits is not None:
        chart.axes[0].set_ylim(*limits)
        chart.caption += " Values that leave the axis are cut."
    return chart


def _draw_band(
    chart: Chart, axes: Axes, label: str, bands: Bands, position: int, metric: str
) -> None:
    style = line_style(position)
    (line,) = axes.plot(bands.rounds, bands.middle, linewidth=1.5, markevery=12, **style)
    texts = [
        f"round {x:g}: {value_text(middle, metric)} ({value_text(low, metric)} to "
        f"{value_text(high, metric)})"
        for x, low, middle, high in zip(*(part.tolist() for part in bands), strict=True)
    ]
    chart.tag(line, label, texts)
    band = axes.fill_between(
        bands.rounds, bands.low, bands.high, color=style["color"], alpha=0.12, linewidth=0.0
    )
    chart.tag(band, label)
    axes.grid()
    format_axis(axes, metric)


@styled
def dropped(result: StudyResult) -> Chart | None:
    """Draw how many uploads were refused in each round; None if there are none."""
    return _counts(
        result,
        f"{result.study.name}: uploads refused in each round",
        "An upload is refused when it is not finite. Algorithms without any are left out.",
        "uploads, all seeds",
        _dropped_by_round,
    )


@styled
def diverged(result: StudyResult) -> Chart | None:
    """Draw how many runs have diverged by round; None if there are none."""
    return _counts(
        result,
        f"{result.study.name}: runs that have diverged",
        "Algorithms without diverged runs are left out.",
        "runs",
        _diverged_by_round,
    )


_Counts = tuple[Sequence[float], Sequence[float]]


def _counts(
    result: StudyResult,
    title: str,
    caption: str,
    ylabel: str,
    count: Callable[[Sequence[Run]], _Counts],
) -> Chart | None:
    counted = {label: count(runs) for label, runs in result.study.members.items()}
    found = {label: both for label, both in counted.items() if any(both[1])}
    if not found:
        return None
    chart = Chart(title, caption, (6.4, 3.6))
    axes = chart.body.add_subplot()
    for label, (x, y) in found.items():
        style = line_style(_position(result, label))
        (line,) = axes.plot(x, y, linewidth=1.6, drawstyle="steps-post", **style)
        chart.tag(line, label)
    axes.grid()
    axes.set_xlim(left=0.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.set_xlabel("round")
    axes.set_ylabel(ylabel)
    chart.name_series(axes.get_lines(), list(found))
    return chart


def _dropped_by_round(runs: Sequence[Run]) -> _Counts:
    totals: dict[int, float] = {}
    for run in runs:
        for round_, count in zip(run.log.rounds, run.log.dropped, strict=True):
            totals[round_] = totals.get(round_, 0.0) + count
    return sorted(totals), [totals[round_] for round_ in sorted(totals)]


def _diverged_by_round(runs: Sequence[Run]) -> _Counts:
    ends = sorted(run.diverged for run in runs if run.diverged is not None)
    last = max(run.asked or run.done for run in runs)
    steps = np.arange(len(ends) + 1)
    return [0, *ends, last], [*steps, len(ends)]


def _position(result: StudyResult, label: str) -> int:
    """Return the position of an algorithm in its study, which fixes its colour."""
    return list(result.study.members).index(label)
