"""The section of grids: a heat-map per algorithm, with what was chosen and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedzmg.report.html.blocks import Block, Map, Maps, Notes, Section, Table
from fedzmg.report.html.svg.cells import heat_map
from fedzmg.report.html.svg.parts import Frame
from fedzmg.report.tables.grids import best_points
from fedzmg.results import paper
from fedzmg.results.formatting import NONE, count_text, is_share, setting_text, value_text
from fedzmg.results.grids import Field, field, limits_of, name_of
from fedzmg.results.reading import Extra, Material
from fedzmg.results.study_result import StudyResult

DIVERGED = "\u00d7"
_HALVES = {"tune": "the half of the test data set aside for choosing", "test": "all test data"}


def sections(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[Section]:
    """One section for all grids."""
    del outcomes
    if not material.grids:
        return
    blocks: list[Block] = []
    for i, extra in enumerate(material.grids):
        blocks += [_block(extra, i), Table(best_points(extra.content), "Best points")]
    if any(str(extra.content["task"]) in paper.COUNTERPARTS for extra in material.grids):
        words = (
            "The paper shows its own grids only as heat-maps in a figure and prints neither the "
            "pairs it chose nor their scores, so none stand beside these."
        )
        blocks.append(Notes("", (words,)))
    facts = (
        "A stronger colour is better, on one scale for all maps of a grid; the frame marks the "
        f"chosen point; {DIVERGED} diverged; {NONE} stopped early."
    )
    yield Section("grids", "Grids", facts, tuple(blocks))


def _block(extra: Extra, position: int) -> Maps:
    data = extra.content
    half = _HALVES.get(str(data["selection"]), data["selection"])
    seeds = count_text(len(data["seeds"]), "seed")
    facts = [
        extra.place,
        f"score: mean {data['metric']} of the last {data['last']} of {data['rounds']} rounds "
        f"({seeds})",
        f"chosen on {half}, {data['examples']:,} examples",
    ]
    if not data["complete"]:
        facts.append("not finished yet")
    entries = list(data["algorithms"].values())
    fields = [field(entry, higher_is_better=data["higher_is_better"]) for entry in entries]
    limits = limits_of(fields)
    maps = tuple(
        _map(entry, data, one, limits, f"g{position}-{i}")
        for i, (entry, one) in enumerate(zip(entries, fields, strict=True))
    )
    return Maps(name_of(data), " · ".join(facts), maps)


def _map(
    entry: Mapping[str, Any],
    data: Mapping[str, Any],
    one: Field,
    limits: tuple[float, float],
    key: str,
) -> Map:
    metric, best = str(data["metric"]), entry["best"]
    name = str(entry["label"])
    lead, warning = "Every point diverged.", ""
    if best is not None:
        options = ", ".join(f"{k} = {_three(v)}" for k, v in best["options"].items())
        lead = f"Best: {options}: {value_text(best['score'], metric)}. {_around(best, metric)}"
        lead += _by_test(entry, metric)
        if best["border"]:
            edges = ", ".join(best["border_axes"])
            warning = f"The best lies on the border of {edges}: a wider grid may do better."
    across = one.columns + (f"; best over {', '.join(one.others)}" if one.others else "")
    # The largest on top, as on any vertical axis.
    cells = [
        [
            DIVERGED if lost else float(score) if math.isfinite(score) else NONE
            for score, lost in zip(scores, losses, strict=True)
        ]
        for scores, losses in zip(one.scores[::-1], one.diverged[::-1], strict=True)
    ]
    stopped = int(one.stopped.sum())
    if stopped:
        lead += f" {count_text(stopped, 'point')} stopped early."
    chosen = None
    if best is not None:
        row, column = one.place(best["options"])
        chosen = len(one.row_values) - 1 - row, column
    described = f"Scores ({metric}) of {len(entry['points'])} points."
    drawing = heat_map(
        Frame(key, f"Grid of {name} on {name_of(data)}", described, across, one.rows),
        [_three(value) for value in one.column_values],
        [_three(value) for value in reversed(one.row_values)] if one.rows else [""],
        cells,
        limits=limits,
        best=chosen,
        number=_percent if is_share(metric) else _three,
        falling=not data["higher_is_better"],
    )
    return Map(name, lead, warning, drawing)


def _by_test(entry: Mapping[str, Any], metric: str) -> str:
    """What the whole test set would choose, by which the paper does, if that was looked at."""
    if entry.get("best_by_test") is None:
        return ""
    other = entry["best_by_test"]
    score = value_text(other["score"], metric)
    if other["options"] == entry["best"]["options"]:
        return f" All test data would choose the same ({score})."
    options = ", ".join(f"{k} = {_three(v)}" for k, v in other["options"].items())
    return f" All test data, by which the paper chooses, would choose {options} ({score})."


def _around(best: Mapping[str, Any], metric: str) -> str:
    """How the neighbours of the chosen point do."""
    around = [one["score"] for one in best["neighbours"] if one["score"] is not None]
    if not around:
        return ""
    low, high = value_text(min(around), metric), value_text(max(around), metric)
    return f"Its neighbours: {low.removesuffix(' %')} to {high}."


def _three(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else setting_text(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
