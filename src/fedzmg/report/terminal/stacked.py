"""Tables with more columns than a terminal has room for: they go on below, with the names again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Blanks between two columns."""


class Column(NamedTuple):
    """A column of numbers, or the one of the names."""

    head: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        """Of the widest line."""
        return max(map(cell_len, [*self.head.splitlines(), *self.cells]))


def stacked(names: Column, columns: Sequence[Column], width: int) -> Iterator[RenderableType]:
    """Tables one below the other, each with the names and as many columns as there is room for.

    Names take half of the width at most and are folded where they are longer; numbers never are.

    Args:
        names: of the rows.
        columns: their numbers.
        width: of the terminal.
    """
    widest = max(column.width for column in columns)
    room = min(names.width, width // 2, width - _GAP - widest)
    left = list(columns)
    while left:
        shown = [left.pop(0)]
        used = room + _GAP + shown[0].width
        while left and (used := used + _GAP + left[0].width) <= width:
            shown.append(left.pop(0))
        out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        out.add_column(names.head, overflow="fold", width=room)
        for column in shown:
            out.add_column(column.head, justify="right", no_wrap=True, min_width=column.width)
        for name, *cells in zip(names.cells, *(column.cells for column in shown), strict=True):
            out.add_row(Text(name), *cells)
        yield from (out, Text())
