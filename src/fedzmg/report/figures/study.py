"""Figures of a study: curves, final values, differences, and the spread over single clients."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, format_axis, styled, usual_range, wrapped
from fedzmg.results import formatting as fmt
from fedzmg.results import scores
from fedzmg.results.reading import Study
from fedzmg.results.scores import SHARES, Bands, Curve, band_around, evaluated_runs
from fedzmg.results.study_result import StudyResult

MOST_POINTS = 300  # vertices of a drawn curve; longer curves are thinned
_STEPS = [1, 2, 2.5, 5, 10]
_XLABELS = {"rounds": "round", "mib": "MiB moved, all clients, both ways"}
LABEL_WIDTH = 34


def _shown(result: StudyResult) -> dict[str, Curve]:
    """Return the curves by label, each with every n-th point and the last."""
    found = {}
    for score in result.scores:
        if (curve := score.curve) is not None:
            number = len(curve.mean)
            kept = sorted({*range(0, number, -(-number // MOST_POINTS)), number - 1})
            thin = {name: part[kept] for name, part in curve._asdict().items() if np.ndim(part)}
            found[score.shown_label] = curve._replace(**thin)
    return found


@styled
def curves(result: StudyResult) -> Chart | None:
    """Draw the mean test curve of every algorithm by round; None if nothing was evaluated."""
    study, shown = result.study, _shown(result)
    runs = fmt.count_text(len(study.seeds), "seed")
    title = f"{study.name}, {runs}: test {study.metric} by round"
    caption = _caption(result, shown) if shown else ""
    return _chart(shown, study, "rounds", title, caption, (9.0, 4.8))


@styled
def traffic(result: StudyResult) -> Chart | None:
    """Draw the mean test curve of every algorithm by traffic; None if nothing was evaluated."""
    title = f"{result.study.name}: test {result.study.metric} by traffic"
    caption = "The further left, the cheaper."
    return _chart(_shown(result), result.study, "mib", title, caption, (6.4, 4.0))


def _chart(
    shown: Mapping[str, Curve], study: Study, by: str, title: str, caption: str, size: style.Size
) -> Chart | None:
    """Draw curves by rounds or MiB: in one panel, or in one per family of many algorithms."""
    if not shown:
        return None
    if len(shown) > style.MOST_IN_ONE_PANEL:
        return _panels(shown, study, by, title, caption)
    chart = Chart(title, caption, size)
    axes = chart.panel(_XLABELS[by], f"test {study.metric}", study.metric)
    handles: dict[str, Line2D] = {}
    for i, (label, curve) in enumerate(shown.items()):
        order = 3.0 - 0.5 * i / len(shown)
        handles[label] = _draw(chart, axes, label, curve, i, study.metric, by, zorder=order)
    levels = _draw_levels(axes, study)
    _limit(axes, shown, by)
    # Names are in the order in which the curves end.
    labels = sorted(shown, key=lambda label: -shown[label].mean[-1])
    names = [f"threshold {fmt.goal_text(level, study.metric)}" for level in study.thresholds]
    chart.name_series([*map(handles.__getitem__, labels), *levels], [*labels, *names])
    return chart


def _panels(shown: Mapping[str, Curve], study: Study, by: str, title: str, caption: str) -> Chart:
    """Draw a panel per family over all other curves in grey, the reference in every panel."""
    families: dict[str, list[str]] = {}
    for label in shown:  # variants have a colon or a remark
        families.setdefault(re.split(r":| \(", label)[0], []).append(label)
    reference, first = next(iter(shown.items()))
    names = {label: wrapped(label, 36) for label in shown}
    lines = [sum(1 + names[own].count("\n") for own in (*f, reference)) for f in families.values()]
    height = 1.9 + 0.14 * max(lines)
    size = (2.5 * style.COLUMNS, -(-len(families) // style.COLUMNS) * height + 0.8)
    chart = Chart(title, f"{caption} Grey: all other algorithms.", size)
    panels = chart.small_panels(list(families), _XLABELS[by], f"test {study.metric}", study.metric)
    gap = np.array([np.nan])  # all curves in one line with gaps
    x = np.concatenate([part for curve in shown.values() for part in (getattr(curve, by), gap)])
    y = np.concatenate([part for curve in shown.values() for part in (curve.mean, gap)])
    for axes, members in zip(panels, families.values(), strict=True):
        axes.plot(x, y, color=style.GHOST, linewidth=0.6, zorder=1)
        handles = []
        for i, label in enumerate(members):
            own = (label, shown[label], i, study.metric, by)
            handles.append(_draw(chart, axes, *own, zorder=4.0, linewidth=1.4))
        labels = list(members)
        if reference not in members:
            quiet: dict[str, Any] = {"color": style.QUIET_INK, "linestyle": style.DASHES[3]}
            handles += axes.plot(getattr(first, by), first.mean, linewidth=1.0, **quiet)
            labels.append(reference)
        _draw_levels(axes, study)
        legend = axes.legend(
            handles, [names[label] for label in labels], fontsize=6.5, handlelength=2.0,
            borderpad=0.1, labelspacing=0.3, loc="upper left", bbox_to_anchor=(0.0, -0.16),
            borderaxespad=0.0,
        )  # fmt: skip
        chart.tag_legend(legend, labels)
    _limit(panels[0], shown, by)
    return chart


def _draw(
    chart: Chart, axes: Axes, label: str, curve: Curve, position: int, metric: str, by: str,
    **options: Any,
) -> Line2D:  # fmt: skip
    """Draw a curve with a band of one standard deviation; a cross ends one that diverged."""
    x, mean, band = getattr(curve, by), curve.mean, None
    spreads: list[Any] = [None] * len(mean)
    if curve.spread is not None:
        spreads, band = curve.spread.tolist(), band_around(mean, curve.spread, metric)
    form = "round {:,g}" if by == "rounds" else "{:,.1f} MiB"
    points = zip(x.tolist(), mean.tolist(), spreads, strict=True)
    texts = [f"{form.format(at)}: {fmt.spread_text(y, sd, metric)}" for at, y, sd in points]
    line = chart.curve(axes, x, mean, label, position, texts, band, **options)
    if curve.broke_off:
        (cross,) = axes.plot(
            x[-1:], mean[-1:], "x", color=line.get_color(), markersize=6.0, markeredgewidth=1.7,
            clip_on=False, zorder=4.5,
        )  # fmt: skip
        chart.tag(cross, label)
    return line


def _draw_levels(axes: Axes, study: Study) -> list[Line2D]:
    dotted: dict[str, Any] = {"color": style.QUIET_INK, "linestyle": style.DOTTED}
    return [axes.axhline(at, linewidth=1.2, zorder=1.5, **dotted) for at in study.thresholds]


def _limit(axes: Axes, shown: Mapping[str, Curve], by: str) -> None:
    """Start at zero and end with the longest curve."""
    axes.set_xlim(0.0, max(float(getattr(curve, by)[-1]) for curve in shown.values()) or 1.0)
    axes.margins(y=0.04)
    ticks = 8
    if by == "mib":  # has longer numbers
        ticks = 5
        axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=_STEPS, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=_STEPS))


def _caption(result: StudyResult, shown: Mapping[str, Curve]) -> str:
    counts = sorted({curve.averaged for curve in shown.values()})
    number = " to ".join(dict.fromkeys(map(str, (counts[0], counts[-1]))))
    band = "; band: one standard deviation either way, cut to possible values" * (counts != [1])
    step = -(-max(len(s.curve.mean) for s in result.scores if s.curve is not None) // MOST_POINTS)
    thinned = f" Drawn with one of {step} evaluations; tables and files have all of them."
    words = "One run each." if counts == [1] else f"Mean of {number} runs{band}."
    return words + thinned * (step > 1)


@styled
def seeds(result: StudyResult) -> Chart | None:
    """Draw the final value of every run, best algorithm first."""
    metric = result.study.metric
    finished = [s for s in result.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finished:
        return None
    caption = "A dot is a run, the upright stroke their mean; best first."
    notes = [fmt.value_text(score.mean, metric) for score in finished]
    title = f"{result.study.name}: final {metric} of every seed"
    chart, axes = _row_chart(title, caption, [score.label for score in finished], notes)
    for y, score in enumerate(finished):
        values = score.finals.values()
        own = style.COLOURS[result.scores.index(score) % len(style.COLOURS)]
        (dots,) = axes.plot([*values], [y] * len(values), "o", color=own, markersize=4.5, zorder=3)
        texts = [f"seed {s}: {fmt.value_text(v, metric)}" for s, v in score.finals.items()]
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
    notes = [f"p = {fmt.p_text(score.adjusted)}" for score, _, _ in rows]
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
        texts = [fmt.value_text(end, study.metric, signed=True) for end in ends]
        chart.tag(mark, score.label, ["{} ({} to {})".format(*texts)])
    format_axis(axes, study.metric, vertical=False, signed=True)
    limits = usual_range(end for _, test, _ in rows for end in (0.0, test.ci_low, test.ci_high))
    if limits is not None:
        axes.set_xlim(*limits)
        chart.caption += " Intervals that leave the axis are cut."
    axes.axvline(0.0, color=style.QUIET_INK, linewidth=0.9, zorder=1.5)
    unit = ", in points" if fmt.is_share(study.metric) else ""
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
    for label, own in evaluated_runs(study).items():
        if own:
            curves = scores.sorted_curves(own, higher_is_better=higher)
            mean = low = high = curves.mean(axis=0)
            if len(curves) > 1:
                low, high = band_around(mean, curves.std(axis=0, ddof=1), study.metric)
            found[label] = Bands(100.0 * SHARES, low, mean, high)
    title = f"{study.name}: {study.metric} of every client, worst first"
    caption = f"The flatter and the {'higher' if higher else 'lower'}, the fairer"
    if len(study.seeds) > 1:
        caption += "; mean over seeds with one standard deviation"
    drawn = _banded(result, found, title, f"{caption}.", study.metric, "percent of the clients")
    for axes in [] if drawn is None else drawn.body.axes:
        for level in study.thresholds:
            axes.axhline(level, color=style.QUIET_INK, linestyle=style.DOTTED, linewidth=1.0)
    return drawn


@styled
def clients_by_round(result: StudyResult) -> Chart | None:
    """Draw median and inner four fifths of the clients' metric by round."""
    study = result.study
    found = {label: scores.metric_bands(own) for label, own in evaluated_runs(study).items()}
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
            low, middle, high = (fmt.value_text(value, metric) for value in values)
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


# By the stem of their files; each is None where there is nothing to draw.
STUDY_FIGURES: dict[str, Callable[[StudyResult], Chart | None]] = {
    "curves": curves, "differences": differences, "seeds": seeds, "traffic": traffic,
    "clients": clients, "clients-by-round": clients_by_round,
}  # fmt: skip
