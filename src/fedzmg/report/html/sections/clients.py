"""Single clients on the page: a table, their losses by round, and how a metric is spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from markupsafe import Markup

from fedzmg.report.html.blocks import Block, Chart, Charts, LegendItem, Notes, Panel, Panels, Table
from fedzmg.report.html.svg import curves as svg
from fedzmg.report.html.svg.bands import Band, bands, limits_of, panel
from fedzmg.report.html.svg.parts import HALF, LOW, Frame, Number, percent, plain, swatch
from fedzmg.report.html.svg.rows import Dots, rows
from fedzmg.report.tables.clients import clients as clients_sheet
from fedzmg.results.formatting import INDEX, goal_text, is_share, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.over_clients import (
    MOST_POINTS,
    SHARES,
    Bands,
    loss_spreads,
    metric_spreads,
    sorted_averages,
)
from fedzmg.results.study_result import StudyResult

MOST_IN_ONE_CHART = 8


def clients(outcome: StudyResult, key: str) -> Iterator[Block]:
    """How evenly algorithms serve clients, as far as the runs kept it; else what is missing."""
    sheet = clients_sheet(outcome)
    if sheet is not None:
        yield Table(sheet, "Clients")
    notes = missing(outcome)
    if notes:
        yield Notes("", (notes,))
    few = len(outcome.scores) <= MOST_IN_ONE_CHART
    spreads = [one for make in (_metric_by_round, _losses) if (one := make(outcome, key)).bands]
    first = _sorted(outcome, key) if few else _intervals(outcome, key)
    charts = [] if first is None else [first]
    # The last one of an odd number would stand beside nothing.
    odd = (len(charts) + len(spreads)) % 2
    if few:
        wide = [odd == 1 and one is spreads[-1] for one in spreads]
        charts += [_banded(one, wide=full) for one, full in zip(spreads, wide, strict=True)]
    if charts:
        yield Charts(tuple(charts))
    if not few:
        yield from map(_panels, spreads)


def missing(outcome: StudyResult) -> str:
    """What the runs do not say about single clients, in one line; empty if nothing is missing."""
    runs = outcome.study.runs
    blind = [run for run in runs if run.clients is None]
    mute = [run for run in runs if not any(run.log.client_loss)]
    unlucky = [run for run in runs if run.clients is not None and run.diverged is not None]
    parts = []
    if blind:
        parts.append(
            f"{_many(len(blind), len(runs))} no metric by client (clients.safetensors), which is "
            "written when a run ends"
        )
    if mute:
        parts.append(
            f"{_many(len(mute), len(runs))} no training losses by client, which older versions "
            "did not keep"
        )
    if unlucky:
        parts.append(f"{len(unlucky)} of {len(runs)} runs diverged and are left out here")
    return "Clients: " + "; ".join(parts) + "." if parts else ""


def _many(some: int, total: int) -> str:
    return "the runs have" if some == total else f"{some} of {total} runs have"


def _sorted(outcome: StudyResult, key: str) -> Chart | None:
    study = outcome.study
    lines = _sorted_lines(study)
    if not lines:
        return None
    title = f"{study.metric.capitalize()} of every client, worst first"
    told = "; ".join(
        f"{line.label}: {value_text(line.y[10], study.metric)} at a tenth of the clients, "
        f"{value_text(line.y[50], study.metric)} in the middle"
        for line in lines
    )
    frame = Frame(
        f"{key}-sorted", title, f"{told}.", "share of the clients, in percent",
        f"{study.metric} on their own examples",
    )  # fmt: skip
    levels = [
        svg.Level(level, f"threshold {goal_text(level, study.metric)}")
        for level in study.thresholds
    ]
    drawing = svg.curves(lines, frame, levels=levels, number=_number(study.metric))
    lead = (
        "Clients from the worst served to the best: the flatter and the higher, the fairer."
        if study.higher_is_better
        else "Clients from the worst served to the best: the flatter and the lower, the fairer."
    )
    if any(line.band is not None for line in lines):
        lead += " Mean over seeds, with one standard deviation."
    return Chart("clients", title, lead, drawing.markup, _legend(lines), not drawing.named)


def _intervals(outcome: StudyResult, key: str) -> Chart | None:
    """The clients of many algorithms, a row each."""
    study = outcome.study
    lines = _sorted_lines(study)
    if not lines:
        return None
    dots = []
    for line in lines:
        low, high = sorted((line.y[10], line.y[90]))
        note = value_text(line.y[50], study.metric)
        dots.append(Dots(line.label, 0, (), line.y[50], (low, high), note, strong=True))
    dots.sort(key=lambda one: one.centre or 0.0, reverse=study.higher_is_better)
    title = f"{study.metric.capitalize()} over clients"
    told = "; ".join(f"{one.label} {one.note}" for one in dots)
    frame = Frame(f"{key}-sorted", title, f"{told}.", f"{study.metric} on their own examples")
    lead = "The median client (beside it its value), and 10 to 90 % of the clients."
    drawing = rows(dots, frame, number=_number(study.metric))
    return Chart("clients", title, lead, drawing)


def _sorted_lines(study: Study) -> list[svg.Line]:
    """The clients of every algorithm, worst first; shares in percent."""
    style = {label: i for i, label in enumerate(study.members)}
    lines = []
    for label, one in sorted_averages(study).items():
        edges = None if one.band is None else (one.band.low.tolist(), one.band.high.tolist())
        x, y = (100.0 * SHARES).tolist(), one.mean.tolist()
        lines.append(svg.Line(label, style[label], x, y, edges))
    return lines


class _Spread(NamedTuple):
    """What is drawn of a spread over clients by round."""

    frame: Frame
    lead: str
    number: Number
    bands: list[Band]


def _metric_by_round(outcome: StudyResult, key: str) -> _Spread:
    study = outcome.study
    title = f"{study.metric.capitalize()} over clients by round"
    lead = "The median client, and the band from 10 to 90 % of the clients; mean over seeds."
    ylabel = f"{study.metric} on their own examples"
    frame = Frame(f"{key}-over-clients", title, "", INDEX, ylabel)
    return _spread(outcome, metric_spreads(study), frame, lead, study.metric)


def _losses(outcome: StudyResult, key: str) -> _Spread:
    title = "Training loss over clients by round"
    lead = "The median client of a cohort, and the band from 10 to 90 % of its clients; mean over "
    together = max(run.done for run in outcome.study.runs) > MOST_POINTS
    lead += "seeds and neighbouring rounds." if together else "seeds."
    frame = Frame(f"{key}-client-loss", title, "", INDEX, "mean local loss")
    return _spread(outcome, loss_spreads(outcome.study), frame, lead, "loss")


def _spread(
    outcome: StudyResult, found: Mapping[str, Bands], frame: Frame, lead: str, metric: str
) -> _Spread:
    style = {label: i for i, label in enumerate(outcome.study.members)}
    drawn = [
        Band(
            svg.Line(label, style[label], one.indices.tolist(), one.middle.tolist()),
            one.low.tolist(),
            one.high.tolist(),
        )
        for label, one in found.items()
    ]
    told = "; ".join(
        f"{band.line.label} ends at {value_text(band.line.y[-1], metric)} "
        f"({value_text(band.low[-1], metric)} to {value_text(band.high[-1], metric)})"
        for band in drawn
    )
    return _Spread(frame._replace(description=f"{told}."), lead, _number(metric), drawn)


def _banded(spread: _Spread, *, wide: bool) -> Chart:
    frame, lead, number, found = spread
    drawing = bands(found, frame, number=number, size=LOW if wide else HALF)
    return Chart(
        "clients", frame.title, lead, drawing.markup, _legend([band.line for band in found]),
        not drawing.named, wide=wide,
    )  # fmt: skip


def _panels(spread: _Spread) -> Panels:
    frame, lead, number, found = spread
    limits = limits_of(found)
    small = []
    for i, band in enumerate(found):
        label = band.line.label
        own = Frame(f"{frame.key}{i}", f"{label}: {frame.title}", "", frame.xlabel)
        line = band.line._replace(style=0)
        drawing = panel(band._replace(line=line), own, limits, number=number)
        small.append(Panel(label, drawing, ()))
    return Panels(frame.title, f"{lead} Across: {frame.xlabel}.", Markup(""), tuple(small))


def _legend(lines: list[svg.Line]) -> tuple[LegendItem, ...]:
    return tuple(LegendItem(swatch(line.style), line.label) for line in lines)


def _number(metric: str) -> Number:
    return percent if is_share(metric) else plain
