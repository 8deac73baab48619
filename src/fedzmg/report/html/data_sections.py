"""Sections of grids and of heterogeneity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedzmg.report.figures import Chart, grid_names, numbered
from fedzmg.report.html.blocks import (
    Block,
    Notes,
    Picture,
    Section,
    TableBlock,
    Text,
    arranged,
    picture,
)
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import client_by_client, side_by_side
from fedzmg.report.tables.heterogeneity import heterogeneity as measures_of
from fedzmg.results import paper
from fedzmg.results.formatting import count_text, setting_text, slug, value_text
from fedzmg.results.grids import field, name_of
from fedzmg.results.reading import Extra, Material

_HALVES = {"tune": "the half of the test data set aside for choosing", "test": "all test data"}


def grids(material: Material, drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section for all grids."""
    if not material.grids:
        return
    blocks: list[Block] = []
    for i, (stem, extra) in enumerate(zip(grid_names(material), material.grids, strict=True)):
        data = extra.content
        blocks.append(Text(name_of(data), "h3"))
        blocks.append(Text(_facts(extra), "facts"))
        charts = {name: drawn[f"{stem}-{slug(name)}"] for name in data["algorithms"]}
        maps = [
            _map(data, name, chart, f"g{i}-{j}") for j, (name, chart) in enumerate(charts.items())
        ]
        blocks += [arranged(maps), TableBlock(best_points(data), "Best points")]
    if any(str(extra.content["task"]) in paper.COUNTERPARTS for extra in material.grids):
        words = (
            "The paper shows its own grids only as heat maps in a figure and prints neither the "
            "pairs it chose nor their scores."
        )
        blocks.append(Notes("", (words,)))
    facts = (
        "A stronger colour is better, on one scale for all maps of a grid. The frame marks the "
        "chosen point; \u00d7 diverged; \u2013 stopped early."
    )
    yield Section("grids", "Grids", facts, tuple(blocks))


def _facts(extra: Extra) -> str:
    data = extra.content
    half = _HALVES.get(str(data["selection"]), data["selection"])
    facts = [
        extra.shown,
        f"score: mean {data['metric']} of the last {data['last']} of {data['rounds']} rounds "
        f"({count_text(len(data['seeds']), 'seed')})",
        f"chosen on {half}, {data['examples']:,} examples",
        *([] if data["complete"] else ["not finished yet"]),
    ]
    return " \u00b7 ".join(facts)


def _map(data: Mapping[str, Any], name: str, chart: Chart, key: str) -> Picture:
    entry, metric = data["algorithms"][name], str(data["metric"])
    best, caption, warning = entry["best"], "Every point diverged.", ""
    if best is not None:
        caption = f"Best: {_options(best)}: {value_text(best['score'], metric)}."
        around = [one["score"] for one in best["neighbours"] if one["score"] is not None]
        if around:
            low, high = value_text(min(around), metric), value_text(max(around), metric)
            caption += f" Its neighbours: {low.removesuffix(' %')} to {high}."
        other = entry.get("best_by_test")
        if other is not None:
            same = other["options"] == best["options"]
            chosen = "the same point" if same else _options(other)
            score = value_text(other["score"], metric)
            caption += f" By all test data, as in the paper: {chosen} ({score})."
        if best["border"]:
            edges = ", ".join(best["border_axes"])
            warning = f"The best point is on the border of {edges}: a wider grid may do better."
    stopped = int(field(entry, higher_is_better=data["higher_is_better"]).stopped.sum())
    if stopped:
        caption += f" {count_text(stopped, 'point')} stopped early."
    return picture(chart, key, caption, warning)._replace(title=str(entry["label"]), wide=False)


def _options(best: Mapping[str, Any]) -> str:
    texts = {
        key: f"{value:.3g}" if isinstance(value, float) else setting_text(value)
        for key, value in best["options"].items()
    }
    return ", ".join(f"{key} = {text}" for key, text in texts.items())


def heterogeneity(material: Material, drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section for all data sets."""
    reports = [extra.content for extra in material.heterogeneity]
    if not reports:
        return
    blocks: list[Block] = [TableBlock(side_by_side(reports))] if len(reports) > 1 else []
    for i, (suffix, report) in enumerate(zip(numbered(reports), reports, strict=True)):
        blocks.append(TableBlock(measures_of(report), paper.shown(str(report["name"]))))
        stems = [f"heterogeneity{suffix}", f"client-distances{suffix}"]
        charts = [drawn[stem] for stem in stems if stem in drawn]
        pictures = (picture(chart, f"h{i}-{j}") for j, chart in enumerate(charts))
        blocks.append(arranged(pictures))
        blocks += [TableBlock(client_by_client(report))] if report.get("clients") else []
    yield Section("heterogeneity", "Heterogeneity", "", tuple(blocks))
