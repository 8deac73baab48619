"""Final values and differences of runs, and their spread over single clients."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, format_axis, styled, usual_range, wrapped
from fedzmg.results import scores
from fedzmg.results.formatting import is_share, p_text, value_text
from fedzmg.results.scores import SHARES, Bands, band_around, client_tables
from fedzmg.results.study_result import StudyResult

LABEL_WIDTH = 34


@styled
def seeds(result: StudyResult) -> Chart | None:
    """Draw the final value of every run, best algorithm first."""
    metric = result.study.metric
    finished = [s for s in result.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finished:
        return None
    labels = [score.label for score in finished]
    caption = "A dot is a run, the upright stroke their mean; best first."
    notes = [value_text(score.mean, metric) for score in finished]
    title = f"{result.study.name}: final {metric} of every seed"
    chart, axes = _row_chart(title, caption, labels, notes)
    for y, score in enumerate(finished):
        values = score.finals.values()
        own = style.COLOURS[result.scores.index(score) % len(style.COLOURS)]
        (dots,) = axes.plot([*values], [y] * len(values), "o", color=own, markersize=4.5, zorder=3)
        texts = [f"seed {s}: {value_text(v, metric)}" for s, v in score.finals.items()]
        chart.tag(dots, score.label, texts)
        axes.plot([score.mean or 0.0], [y], "|", color=own, markersize=15, markeredgewidth=2)
    axes.set_xlabel(f"final {metric}")
    format_axis(axes, metric, vertical=False)
    return chart


@styled
def differences(result: StudyResult) -> Chart | None:
    """Draw the reference minus every other algorithm with its 95 % interval."""
    study, rows = result.study, []
    for i, score in enumerate(result.scores):
        if score.test is not None and math.isfinite(score.test.mean_difference):
            rows.append((score, score.test, style.COLOURS[i % len(style.COLOURS)]))
    if not rows:
        return None
    rows.sort(key=lambda row: row[1].mean_difference)
    side = "Right" if study.higher_is_better else "Left"
    title = f"{study.name}: {study.reference} minus each of the others"
    caption = f"Mean over paired seeds with its 95 % interval. {side} of zero {study.reference} is "
    caption += "better. Filled: significant after Holm's correction (p at the right)."
    notes = [f"p = {p_text(score.adjusted)}" for score, _, _ in rows]
    chart, axes = _row_chart(title, caption, [score.label for score, _, _ in rows], notes)
    for y, (score, test, colour) in enumerate(rows):
        centre, low, high = ends = (test.mean_difference, test.ci_low, test.ci_high)
        if math.isfinite(low) and math.isfinite(high):
            spread = [[centre - low], [high - centre]]
            axes.errorbar([centre], [y], xerr=spread, color=colour, capsize=3, linewidth=1.6)
        (mark,) = axes.plot(
            [centre], [y], "o", color=colour, markersize=7, markeredgewidth=1.6, zorder=3,
            markerfacecolor=colour if score.significant else style.PAPER,
        )  # fmt: skip
        texts = [value_text(end, study.metric, signed=True) for end in ends]
        chart.tag(mark, score.label, ["{} ({} to {})".format(*texts)])
    format_axis(axes, study.metric, vertical=False, signed=True)
    limits = usual_range(end for _, test, _ in rows for end in (0.0, test.ci_low, test.ci_high))
    if limits is not None:
        axes.set_xlim(*limits)
        chart.caption += " Intervals that leave the axis are cut."
    axes.axvline(0.0, color=style.QUIET_INK, linewidth=0.9, zorder=1.5)
    unit = ", in points" if is_share(study.metric) else ""
    axes.set_xlabel(f"difference of final {study.metric}{unit}")
    return chart


def _row_chart(title: str, caption: str, labels: list[str], notes: list[str]) -> tuple[Chart, Axes]:
    """Make a figure as high as its rows, which have names at the left and notes at the right."""
    names = [wrapped(label, LABEL_WIDTH) for label in labels]
    height = max(0.3, 0.25 + 0.15 * max(name.count("\n") for name in names))
    chart = Chart(title, caption, (6.4, 1.35 + height * len(labels)))
    axes = chart.body.add_subplot()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x")
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(notes)), notes)
    right.tick_params(length=0, labelcolor=style.QUIET_INK, labelsize=8)
    right.spines[:].set_visible(False)
    return chart, axes


@styled
def clients(result: StudyResult) -> Chart | None:
    """Draw the metric of every client, worst first."""
    study, higher, found = result.study, result.study.higher_is_better, {}
    for label, own in client_tables(study).items():
        if own:
            curves = scores.sorted_curves([*own.values()], higher_is_better=higher)
            mean = low = high = curves.mean(axis=0)
            if len(curves) > 1:
                low, high = band_around(mean, curves.std(axis=0, ddof=1), study.metric)
            found[label] = Bands(100.0 * SHARES, low, mean, high)
    title = f"{study.name}: {study.metric} of every client, worst first"
    caption = f"The flatter and the {'higher' if higher else 'lower'}, the fairer"
    if len(study.seeds) > 1:
        caption += "; mean over seeds with one standard deviation"
    xlabel = "share of the clients, in percent"
    drawn = _banded(result, found, title, f"{caption}.", study.metric, xlabel)
    for axes in [] if drawn is None else drawn.body.axes:
        for level in study.thresholds:
            axes.axhline(level, color=style.QUIET_INK, linestyle=style.DOTTED, linewidth=1.0)
    return drawn


@styled
def clients_by_round(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the clients' metric by round."""
    study, tables = result.study, client_tables(result.study)
    found = {label: scores.metric_bands([*own.values()]) for label, own in tables.items()}
    title = f"{study.name}: {study.metric} over clients by round"
    caption = "The median client, and the band from 10 to 90 % of the clients; mean over seeds."
    return _banded(result, found, title, caption, study.metric)


def _banded(
    result: StudyResult, bands_by_label: Mapping[str, Bands | None], title: str, caption: str,
    metric: str, xlabel: str = "round",
) -> Chart | None:  # fmt: skip
    """Draw curves with bands in one panel, or in one for each of many algorithms."""
    found = {label: bands for label, bands in bands_by_label.items() if bands is not None}
    if not found:
        return None
    ylabel, single = f"{metric} on own examples", len(found) <= style.MOST_IN_ONE_PANEL
    if single:
        chart = Chart(title, caption)
        panels = [chart.panel(xlabel, ylabel, metric)] * len(found)
    else:
        rows = -(-len(found) // style.COLUMNS)
        chart = Chart(title, caption, (2.5 * style.COLUMNS, 1.5 * rows + 0.8))
        panels = chart.small_panels(list(found), xlabel, ylabel, metric)
    lines = []
    for axes, (label, bands) in zip(panels, found.items(), strict=True):
        texts = []
        for x, *values in zip(*(part.tolist() for part in bands), strict=True):
            low, middle, high = (value_text(value, metric) for value in values)
            at = f"round {x:g}" if xlabel == "round" else f"{x:g} % of the clients"
            texts.append(f"{at}: {middle} ({low} to {high})")
        position = list(result.study.members).index(label) if single else 0
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
