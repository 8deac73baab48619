"""Test curves by round or by traffic: one panel, or one per family of algorithms."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedzmg.report.figures import style
from fedzmg.report.figures.style import Chart, styled, wrapped
from fedzmg.results.formatting import count_text, goal_text, spread_text
from fedzmg.results.reading import Study
from fedzmg.results.scores import Curve, band_around
from fedzmg.results.study_result import StudyResult

MOST_POINTS = 300  # vertices of a drawn curve; longer curves are thinned
_STEPS = [1, 2, 2.5, 5, 10]
_XLABELS = {"rounds": "round", "mib": "MiB moved, all clients, both ways"}


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
    title = f"{study.name}, {count_text(len(study.seeds), 'seed')}: test {study.metric} by round"
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
    names = [f"threshold {goal_text(level, study.metric)}" for level in study.thresholds]
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
    texts = [f"{form.format(at)}: {spread_text(y, sd, metric)}" for at, y, sd in points]
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
