"""The charts of a study."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fedzmg.report.html.blocks import Block, Chart, Charts, LegendItem, Panel, Panels
from fedzmg.report.html.sections import trouble
from fedzmg.report.html.svg import curves as svg
from fedzmg.report.html.svg.parts import (
    FULL,
    LOW,
    Frame,
    Number,
    percent,
    plain,
    swatch,
)
from fedzmg.report.html.svg.rows import Dots, rows
from fedzmg.report.html.svg.scatter import scatter
from fedzmg.results.averaging import Band, Curve, band_around, possible
from fedzmg.results.formatting import INDEX, MIB, MINUS, goal_text, is_share, p_text, value_text
from fedzmg.results.grouping import Study, family
from fedzmg.results.study_result import AlgorithmResult, StudyResult

MOST_IN_ONE_CHART = 8
INDEX_SENTENCE = "Index 0 follows the first round, index 5 the sixth."


def charts(outcome: StudyResult, key: str) -> Iterator[Block]:
    """Every chart that the runs have something for."""
    few = len(outcome.scores) <= MOST_IN_ONE_CHART
    makers = (
        _learning if few else None,
        _differences,
        _seeds,
        _against_traffic if few else _final_by_traffic,
        trouble.dropped,
        trouble.diverged,
    )
    found = [make(outcome, key) for make in makers if make is not None]
    drawn = tuple(chart for chart in found if chart is not None)
    if drawn:
        yield Charts(drawn)


def panels(outcome: StudyResult, key: str) -> Iterator[Block]:
    """A small chart per family, everything else behind it in grey, where there are many."""
    study = outcome.study
    drawn = [score for score in outcome.scores if score.curve is not None]
    if len(outcome.scores) <= MOST_IN_ONE_CHART or not drawn:
        return
    lines = [_line(score, 0, study) for score in drawn]
    levels, number = _levels(study), _number(study)
    limits = svg.shared_limits(lines, levels)
    families: dict[str, list[AlgorithmResult]] = {}
    for score in drawn:
        families.setdefault(family(score.label), []).append(score)
    ground = f"{key}-all"
    small = []
    for i, (name, members) in enumerate(families.items()):
        own = [_line(score, style, study) for style, score in enumerate(members)]
        frame = Frame(
            f"{key}-panel{i}", f"{name}: test {study.metric} by round", _ends(members, study),
            INDEX,
        )  # fmt: skip
        drawing = svg.panel(own, ground, frame, limits, levels=levels, number=number)
        small.append(Panel(name, drawing, _legend(members)))
    yield Panels(
        "Test curves by family",
        f"{_curve_words(outcome)} Across: {INDEX}. {INDEX_SENTENCE} Grey: all the others.",
        svg.background(lines, ground, limits, number),
        tuple(small),
    )


def _learning(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    drawn = [score for score in outcome.scores if score.curve is not None]
    if not drawn:
        return None
    title = f"Test {study.metric} by round"
    description = f"{title} on {study.name}: {_ends(drawn, study)}"
    frame = Frame(f"{key}-curves", title, description, INDEX, f"test {study.metric}")
    lines = [_line(score, i, study) for i, score in enumerate(outcome.scores)]
    drawing = svg.curves(lines, frame, levels=_levels(study), number=_number(study), size=FULL)
    lead = f"{_curve_words(outcome)} {INDEX_SENTENCE}"
    return Chart(
        "curves", title, lead, drawing.markup, _legend(outcome.scores), not drawing.named,
        wide=True,
    )  # fmt: skip


def _against_traffic(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    if all(score.curve is None for score in outcome.scores):
        return None
    title = f"Test {study.metric} by traffic"
    frame = Frame(
        f"{key}-traffic", title, f"{title} on {study.name}; the table of traffic has the totals.",
        "MiB moved, all clients, both ways", f"test {study.metric}",
    )  # fmt: skip
    lines = [_line(score, i, study, by_traffic=True) for i, score in enumerate(outcome.scores)]
    drawing = svg.curves(lines, frame, levels=_levels(study), number=_number(study), size=LOW)
    lead = "What a round costs in bytes may differ: the further left, the cheaper."
    return Chart(
        "traffic", title, lead, drawing.markup, _legend(outcome.scores), not drawing.named,
        wide=True,
    )  # fmt: skip


def _final_by_traffic(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    points = [
        (score.label, score.traffic["total"] / MIB, score.mean)
        for score in outcome.ranked
        if score.mean is not None and math.isfinite(score.mean)
    ]
    if not points:
        return None
    title = f"Final {study.metric} by traffic"
    best = points[0]
    frame = Frame(
        f"{key}-traffic", title,
        f"{len(points)} algorithms; the best, {best[0]}, moved {best[1]:,.0f} MiB.",
        "MiB moved in one run, all clients, both ways", f"final {study.metric}",
    )  # fmt: skip
    drawing = scatter(points, frame, number=_number(study), named=True, size=FULL)
    lead = (
        "A dot is an algorithm: high and left is good. Where names would collide, point at a dot."
    )
    return Chart("traffic", title, lead, drawing, wide=True)


def _differences(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    dots = []
    for i, score in enumerate(outcome.scores):
        test = score.test
        if test is not None:
            # The reference minus the other, as in the table of tests.
            dots.append(
                Dots(
                    score.label, i, (), test.mean_difference, (test.ci_low, test.ci_high),
                    f"p = {p_text(score.adjusted)}", score.significant,
                )
            )  # fmt: skip
    if not dots:
        return None
    dots.sort(key=lambda one: one.centre or 0.0)
    title = f"{study.reference} minus each of the others"
    described = "; ".join(
        f"minus {one.label}: {value_text(one.centre, study.metric, signed=True)}, {one.note}"
        for one in dots
    )
    share = is_share(study.metric)
    frame = Frame(
        f"{key}-differences", title, f"{study.reference} {described}.",
        f"final {study.metric} of {study.reference} minus that of the other"
        + (", in points" if share else ""),
    )  # fmt: skip
    better = "right" if study.higher_is_better else "left"
    lead = (
        f"Mean over paired seeds with its 95 % interval; {better} of the line "
        f"{study.reference} is better. Filled: significant after Holm's correction (p beside it)."
    )
    drawing = rows(dots, frame, number=_points if share else plain, zero=True)
    return Chart("differences", title, lead, drawing)


def _points(value: float) -> str:
    return f"{100 * value:+.6g}".replace("-", MINUS) if value else "0"


def _seeds(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    finite = [s for s in outcome.ranked if all(map(math.isfinite, s.finals.values()))]
    if not finite:
        return None
    few = len(outcome.scores) <= MOST_IN_ONE_CHART
    style = {score.label: i if few else 0 for i, score in enumerate(outcome.scores)}
    paired = len(finite) <= MOST_IN_ONE_CHART and any(len(s.finals) > 1 for s in finite)
    dots = [
        Dots(
            score.label, style[score.label],
            [(f"seed {seed}", value) for seed, value in score.finals.items()], score.mean,
            None, value_text(score.mean, study.metric),
        )
        for score in finite
    ]  # fmt: skip
    title = f"Final {study.metric} of every seed"
    described = "; ".join(f"{one.label} {one.note} on average" for one in dots)
    frame = Frame(f"{key}-seeds", title, f"{described}.", f"final {study.metric}")
    lead = "A dot is a run, the upright stroke their mean, best first." + (
        " Thin lines join runs of the same seed." if paired and len(finite) > 1 else ""
    )
    return Chart("seeds", title, lead, rows(dots, frame, number=_number(study), paired=paired))


def _number(study: Study) -> Number:
    return percent if is_share(study.metric) else plain


def _levels(study: Study) -> list[svg.Level]:
    return [
        svg.Level(level, f"threshold {goal_text(level, study.metric)}")
        for level in study.thresholds
    ]


def _line(
    score: AlgorithmResult, style: int, study: Study, *, by_traffic: bool = False
) -> svg.Line:
    curve, label = score.curve, score.shown_label
    if curve is None:
        return svg.Line(label, style, (), ())
    x = curve.mib if by_traffic else curve.indices
    around = _band(curve, study)
    edges = None if around is None else (around.low.tolist(), around.high.tolist())
    return svg.Line(label, style, x.tolist(), curve.mean.tolist(), edges, curve.broke_off)


def _band(curve: Curve, study: Study) -> Band | None:
    if curve.spread is None:
        return None
    return band_around(curve.mean, curve.spread, possible(study.metric))


def _legend(scores: Sequence[AlgorithmResult]) -> tuple[LegendItem, ...]:
    return tuple(LegendItem(swatch(i), score.shown_label) for i, score in enumerate(scores))


def _ends(scores: Sequence[AlgorithmResult], study: Study) -> str:
    """Where curves end, for those who do not see them."""
    told = [
        f"{s.shown_label} ends at {value_text(float(s.curve.mean[-1]), study.metric)}"
        for s in scores
        if s.curve is not None
    ]
    return "; ".join(told) + "."


def _curve_words(outcome: StudyResult) -> str:
    curves = [score.curve for score in outcome.scores if score.curve]
    counts = sorted({curve.averaged for curve in curves})
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    bands = [_band(curve, outcome.study) for curve in curves]
    cut = ", cut to what is possible" if any(one is not None and one.cut for one in bands) else ""
    words = f"Mean of {number} runs; the band is one standard deviation either way{cut}."
    if counts == [1]:
        words = "One run each."
    longest = max(len(curve.indices) for curve in curves)
    if longest > svg.MOST_POINTS:
        step = -(-longest // svg.MOST_POINTS)
        words += f" Drawn with one of {step} evaluations; tables and files have all of them."
    return words
