"""The best points of a grid, from its ``grid.json``, as a table for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fedzmg.report.tables.grids import best_points, stopped_count, stopped_text
from fedzmg.report.terminal.stacked import Column, fits, stacked
from fedzmg.results.formatting import NONE
from fedzmg.results.grids import axes_of


def table(data: Mapping[str, Any], width: int) -> RenderableType:
    """The best point of every algorithm, with its neighbours.

    Args:
        data: what ``grid.json`` holds.
        width: of the terminal; where words find no room, they are below the table, once for all.
    """
    sheet = best_points(data)
    texts = zip(*([cell.text for cell in row] for row in sheet.rows), strict=True)
    names, *columns = (
        Column(head, cells, words=i < sheet.words)
        for i, (head, cells) in enumerate(zip(sheet.heads, texts, strict=True))
    )
    words = [sheet.caption]
    if not fits(names, columns, width):
        columns = _shorter(data, columns)
        words += _said_below(data)
    remark = f" ({data['label']})" if data["label"] else ""
    return Group(
        Text(f"{data['task']}{remark}\n", style="bold"),
        *stacked(names, columns, width),
        Text(" ".join(words), style="table.caption"),
    )


def _shorter(data: Mapping[str, Any], columns: Sequence[Column]) -> list[Column]:
    """The columns without words that are the same in many rows."""
    entries, axes = _entries(data), axes_of(data)
    instead = {"best point": [_point(entry["best"], axes) for entry in entries]}
    if "stop" in data:
        instead["stopped"] = [str(stopped_count(entry["stopped"])) for entry in entries]
    return [
        column._replace(cells=instead.get(column.head, column.cells))
        for column in columns
        if column.head != "remark"
    ]


def _said_below(data: Mapping[str, Any]) -> Iterator[str]:
    """What the shorter columns leave out."""
    entries = _entries(data)
    edge = any(entry["best"] is not None and entry["best"]["border"] for entry in entries)
    yield f"Best point: {', '.join(axes_of(data))}{'; * on the border' if edge else ''}."
    counts: Counter[str] = Counter()
    for entry in entries:
        counts.update(entry.get("stopped", {}))
    if stopped_count(counts):
        yield f"Stopped in all: {stopped_text(counts)}."


def _point(best: Mapping[str, Any] | None, axes: Sequence[str]) -> str:
    """The numbers of a point, in the order of all axes of the grid.

    >>> best = {"options": {"client.lr": 0.1, "server.lr": 1.0}, "border_axes": ["server.lr"]}
    >>> _point(best, ["client.lr", "server.lr"])
    '0.1, 1*'
    """
    if best is None:
        return "all diverged"
    options, edges = best["options"], best["border_axes"]
    return ", ".join(
        f"{options[axis]:.4g}{'*' * (axis in edges)}" if axis in options else NONE for axis in axes
    )


def _entries(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(data["algorithms"].values())
