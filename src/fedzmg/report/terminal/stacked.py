"""Tables with more columns than a terminal has room for: they go on below, with the names again."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
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
_MOST_SHARE = 0.7
"""Of the width, for names whose words would be broken in half of it."""


class Column(NamedTuple):
    """A column of numbers, or the one of the names."""

    head: str
    cells: Sequence[str]
    words: bool = False
    """Words start at the left, numbers end at the right."""
    styles: Mapping[str, str] = MappingProxyType({})
    """Of cells with some texts."""

    @property
    def width(self) -> int:
        """Of the widest line."""
        return max(cell_len(line) for text in (self.head, *self.cells) for line in _lines(text))


def fits(names: Column, columns: Sequence[Column], width: int) -> bool:
    """Whether one table has room for all, with no name folded."""
    return names.width <= _beside(columns, width)


def fits_folded(names: Column, columns: Sequence[Column], width: int) -> bool:
    """Whether one table has room for all, with names folded at blanks, to a few lines."""
    return _folds_well(names, min(names.width, _beside(columns, width)))


def stacked(names: Column, columns: Sequence[Column], width: int) -> Iterator[RenderableType]:
    """Tables one below the other, each with the names and as many columns as there is room for.

    Names are folded at blanks, to a few lines, where one table has room for all columns then. If
    none has, names take half of the width, or somewhat more if that keeps their words whole. Other
    columns are never folded, but for words that no table has room for.

    Args:
        names: of the rows.
        columns: their numbers.
        width: of the terminal.
    """
    left = [_narrowed(column, names, width) for column in columns]
    room = _room(names, left, width)
    while left:
        shown = [left.pop(0)]
        used = room + _GAP + shown[0].width
        while left and (used := used + _GAP + left[0].width) <= width:
            shown.append(left.pop(0))
        out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        out.add_column(Text(folded(names.head, room)), overflow="fold", width=room)
        for column in shown:
            side: Literal["left", "right"] = "left" if column.words else "right"
            wide = min(column.width, width - _GAP - room)
            out.add_column(Text(column.head), justify=side, overflow="fold", width=wide)
        for i, name in enumerate(names.cells):
            cells = [Text(c.cells[i], style=c.styles.get(c.cells[i], "")) for c in shown]
            out.add_row(Text(folded(name, room)), *cells)
        yield from (out, Text())


def said_below(names: Column, words: Column) -> list[str]:
    """Words that find no room beside the names, each once, after the names that they are about.

    >>> said_below(Column("", ["a", "b", "c"]), Column("", ["late", "", "late"]))
    ['a, c: late']
    """
    about: dict[str, list[str]] = {}
    for name, cell in zip(names.cells, words.cells, strict=True):
        about.setdefault(cell, []).append(name)
    return [f"{', '.join(found)}: {cell}" for cell, found in about.items() if cell]


def folded(text: str, room: int) -> str:
    r"""A text in lines that end at blanks, all but the first set in.

    Where a word is longer than a line, they end where parts of a word do, but never within a
    number; where a part is longer, the text is left as it is.

    >>> folded("average: projection + decay", 20), folded("projection", 6)
    ('average: projection\n + decay', 'projection')
    >>> folded("runs/precision-float32", 11), folded("1e-05", 4)
    ('runs/\n precision-\n float32', '1e-05')
    """
    return "\n".join(
        _wrapped(line, room, at_parts=False) or _wrapped(line, room, at_parts=True) or line
        for line in text.splitlines()
    )


class _PartsWrapper(textwrap.TextWrapper):
    """Ends lines also after the signs that join parts of a name."""

    wordsep_re = re.compile(r"(\s+|(?<=[-_./:])(?=[^-_./:\s])(?!\d+\b))")


def _wrapped(line: str, room: int, *, at_parts: bool) -> str:
    """In lines of that width; empty if there are none."""
    wrapper = _PartsWrapper(
        max(room, 1), subsequent_indent=" ", break_long_words=False, break_on_hyphens=at_parts
    )
    lines = wrapper.wrap(line)
    return "\n".join(lines) if max(map(cell_len, lines), default=0) <= room else ""


def _lines(text: str) -> list[str]:
    return text.splitlines() or [""]


def _beside(columns: Sequence[Column], width: int) -> int:
    """What all columns leave to the names."""
    return width - sum(_GAP + column.width for column in columns)


def _room(names: Column, columns: Sequence[Column], width: int) -> int:
    """For the names."""
    if fits_folded(names, columns, width):
        return min(names.width, _beside(columns, width))
    widest = max(column.width for column in columns)
    return max(min(names.width, _share(names, width), width - _GAP - widest), 1)


def _share(names: Column, width: int) -> int:
    """Of the width, for names that leave no room to all columns."""
    whole = _narrowest(names)
    return whole if width // 2 < whole <= _MOST_SHARE * width else width // 2


def _folds_well(names: Column, room: int) -> bool:
    """Whether names take few lines and no word of them is broken."""
    texts = [_wrapped(name, room, at_parts=False) for name in (names.head, *names.cells) if name]
    return all(text and len(_lines(text)) <= _MOST_LINES for text in texts)


def _narrowest(column: Column) -> int:
    """With cells folded at every blank; lines are set in by one but for the first."""
    return max(
        (cell_len(word) + (i > 0) for cell in column.cells for i, word in enumerate(cell.split())),
        default=1,
    )


def _narrowed(column: Column, names: Column, width: int) -> Column:
    """Words in lines that find room beside names, and long heads; numbers as they are."""
    beside = width - _GAP - min(names.width, _share(names, width))
    most = max(beside, min(_narrowest(column), width // 2)) if column.words else width // 2
    if column.width <= most:
        return column
    cells = [folded(cell, most) for cell in column.cells] if column.words else column.cells
    return column._replace(head=folded(column.head, most), cells=cells)
