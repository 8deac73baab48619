"""Spread over single clients, and failures by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from fedzmg.report.figures.rows import Interval, draw_intervals, row_chart
from fedzmg.report.figures.style import (
    COLOURS,
    COLUMNS,
    DOTTED,
    MOST_IN_ONE_PANEL,
    QUIET_INK,
    Chart,
    styled,
    usual_range,
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
    metric, ylabel = study.metric, f"{study.metric} on their own examples"
    if not found:
        return None
    if len(found) > MOST_IN_ONE_PANEL:
        rows = []
        for label, one in found.items():
            low, middle, high = sorted(float(one.mean[i]) for i in (10, 50, 90))
            note = value_text(middle, metric)
            rows.append(Interval(label, COLOURS[0], middle, low, high, note))
        rows.sort(key=lambda row: row.centre, reverse=study.higher_is_better)
        caption = "The median client (its value at the right), and 10 to 90 % of the clients."
        chart = row_chart(f"{study.name}: {metric} over clients", caption, [r.label for r in rows])
        draw_intervals(chart, rows, metric).set_xlabel(ylabel)
        return chart
    better = "higher" if study.higher_is_better else "lower"
    caption = f"Clients from worst to best: the flatter and the {better}, the fairer."
    if any(one.band is not None for one in found.values()):
        caption += " Mean over seeds, with one standard deviation."
    chart = Chart(f"{study.name}: {metric} of every client, worst first", caption)
    axes = chart.panel("share of the clients, in percent", ylabel, metric)
    x, handles = 100.0 * SHARES, []
    for label, curve in found.items():
        texts = [
            f"{share:g} % of the clients: {value_text(value, metric)} or worse"
            for share, value in zip(x.tolist(), curve.mean.tolist(), strict=True)
        ]
        band = None if curve.band is None else curve.band[:2]
        position = _position(result, label)
        handles.append(chart.curve(axes, x, curve.mean, label, position, texts, band))
    for level in study.thresholds:
        axes.axhline(level, color=QUIET_INK, linestyle=DOTTED, linewidth=1.0)
    axes.set_xlim(0.0, 100.0)
    chart.name_series(handles, list(found))
    return chart


@styled
def clients_by_round(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the clients' metric by round."""
    study = result.study
    title = f"{study.name}: {study.metric} over clients by round"
    caption = "The median client, and the band from 10 to 90 % of the clients; mean over seeds."
    label = f"{study.metric} on their own examples"
    return _banded(result, metric_spreads(study), title, caption, label, study.metric)


@styled
def client_loss(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the training losses of a cohort by round."""
    study = result.study
    joined = max(run.done for run in study.runs) > MOST_POINTS
    over = "seeds and neighbouring rounds" if joined else "seeds"
    title = f"{study.name}: training loss over clients by round"
    caption = (
        "The median client of a cohort, and the band from 10 to 90 % of its clients; mean over "
        f"{over}."
    )
    return _banded(result, loss_spreads(study), title, caption, "mean local loss", "loss")


def _banded(
    result: StudyResult, found: Mapping[str, Bands], title: str, caption: str, ylabel: str,
    metric: str,
) -> Chart | None:  # fmt: skip
    if not found:
        return None
    single = len(found) <= MOST_IN_ONE_PANEL
    size = (6.4, 4.0) if single else (2.5 * COLUMNS, 1.5 * -(-len(found) // COLUMNS) + 0.8)
    chart = Chart(title, caption, size)
    if single:
        panels = [chart.panel("round", ylabel, metric)] * len(found)
    else:
        panels = chart.small_panels(list(found), "round", ylabel, metric)
    lines = []
    for axes, (label, bands) in zip(panels, found.items(), strict=True):
        texts = []
        for row in zip(*(part.tolist() for part in bands), strict=True):
            low, middle, high = (value_text(value, metric) for value in row[1:])
            texts.append(f"round {row[0]:g}: {middle} ({low} to {high})")
        position = _position(result, label) if single else 0
        band = (bands.low, bands.high)
        lines.append(chart.curve(axes, bands.rounds, bands.middle, label, position, texts, band))
    if single:
        chart.name_series(lines, list(found))
    panels[0].set_xlim(left=0.0)
    limits = usual_range(edge for bands in found.values() for edge in (*bands.low, *bands.high))
    if limits is not None:
        panels[0].set_ylim(*limits)
        chart.caption += " Values that leave the axis are cut."
    return chart


@styled
def dropped(result: StudyResult) -> Chart | None:
    """Draw how many uploads were refused in each round; None if there are none."""

    def count(runs: Sequence[Run]) -> list[tuple[int, int]]:
        totals: Counter[int] = Counter()
        for run in runs:
            totals.update(dict(zip(run.log.rounds, run.log.dropped, strict=True)))
        return sorted(totals.items())

    title = f"{result.study.name}: uploads refused in each round"
    caption = "An upload is refused when it is not finite. Algorithms without any are left out."
    return _counts(result, title, caption, "uploads, all seeds", count)


@styled
def diverged(result: StudyResult) -> Chart | None:
    """Draw how many runs have diverged by round; None if there are none."""

    def count(runs: Sequence[Run]) -> list[tuple[int, int]]:
        ends = sorted(run.diverged for run in runs if run.diverged is not None)
        last = max(run.asked or run.done for run in runs)
        return [*((end, i) for i, end in enumerate([0, *ends])), (last, len(ends))]

    title = f"{result.study.name}: runs that have diverged"
    return _counts(result, title, "Algorithms without diverged runs are left out.", "runs", count)


def _counts(
    result: StudyResult, title: str, caption: str, ylabel: str,
    count: Callable[[Sequence[Run]], list[tuple[int, int]]],
) -> Chart | None:  # fmt: skip
    counted = {label: count(runs) for label, runs in result.study.members.items()}
    found = {label: pairs for label, pairs in counted.items() if any(y for _, y in pairs)}
    if not found:
        return None
    chart = Chart(title, caption, (6.4, 3.6))
    axes = chart.panel("round", ylabel)
    for label, pairs in found.items():
        x, y = zip(*pairs, strict=True)
        chart.curve(axes, x, y, label, _position(result, label), drawstyle="steps-post")
    axes.set_xlim(left=0.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    chart.name_series(axes.get_lines(), list(found))
    return chart


def _position(result: StudyResult, label: str) -> int:
    """Return the position of an algorithm in its study, which fixes its colour."""
    return list(result.study.members).index(label)
