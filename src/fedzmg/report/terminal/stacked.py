"""Tables with more columns than a terminal has room for: they go on below, with the names again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Blanks between two columns."""
_MOST_LINES = 3
"""Of a name that is folded so that all columns find room beside it."""


class Column(NamedTuple):
    """A column of numbers, or the one of the names."""

    head: str
    cells: Sequence[str]
    words: bool = False
    """Words start at the left, numbers end at the right."""

    @property
    def width(self) -> int:
        """Of the widest line."""
        return max(cell_len(line) for text in (self.head, *self.cells) for line in _lines(text))


def fits(names: Column, columns: Sequence[Column], width: int) -> bool:
    """Whether one table has room for all, with no name folded."""
    return names.width <= _beside(columns, width)


def stacked(names: Column, columns: Sequence[Column], width: int) -> Iterator[RenderableType]:
    """Tables one below the other, each with the names and as many columns as there is room for.

    Names are folded at blanks, to a few lines, where one table has room for all columns then. If
    none has, names take half of the width at most. Other columns are never folded.

    Args:
        names: of the rows.
        columns: their numbers.
        width: of the terminal.
    """
    room = _room(names, columns, width)
    left = list(columns)
    while left:
        shown = [left.pop(0)]
        used = room + _GAP + shown[0].width
        while left and (used := used + _GAP + left[0].width) <= width:
            shown.append(left.pop(0))
        out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        out.add_column(Text(_folded(names.head, room)), overflow="fold", width=room)
        for column in shown:
            side: Literal["left", "right"] = "left" if column.words else "right"
            out.add_column(column.head, justify=side, no_wrap=True, min_width=column.width)
        for name, *cells in zip(names.cells, *(column.cells for column in shown), strict=True):
            out.add_row(Text(_folded(name, room)), *cells)
        yield from (out, Text())


def _lines(text: str) -> list[str]:
    return text.splitlines() or [""]


def _beside(columns: Sequence[Column], width: int) -> int:
    """What all columns leave to the names."""
    return width - sum(_GAP + column.width for column in columns)


def _room(names: Column, columns: Sequence[Column], width: int) -> int:
    """For the names."""
    beside = min(names.width, _beside(columns, width))
    if _folds_well(names, beside):
        return beside
    widest = max(column.width for column in columns)
    return min(names.width, width // 2, width - _GAP - widest)


def _folds_well(names: Column, room: int) -> bool:
    """Whether names take few lines and no word of them is broken."""
    folded = [_lines(_folded(name, room)) for name in (names.head, *names.cells)]
    return all(len(lines) <= _MOST_LINES and max(map(cell_len, lines)) <= room for lines in folded)


def _folded(name: str, room: int) -> str:
    r"""A name in lines that end at blanks, all but the first set in; as it is if a word is longer.

    >>> _folded("average: projection + decay", 20), _folded("projection", 6)
    ('average: projection\n + decay', 'projection')
    """
    if room < 1:
        return name
    lines = textwrap.wrap(
        name, room, subsequent_indent=" ", break_long_words=False, break_on_hyphens=False
    )
    return name if any(cell_len(line) > room for line in lines) else "\n".join(lines)
