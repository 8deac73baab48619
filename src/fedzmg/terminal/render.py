"""Tables and text on a terminal, drawn by rich.

User text passes through :func:`fedzmg.results.formatting.plain` and is never read as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fedzmg.report.tables.table import Table
from fedzmg.results.formatting import plain

_STYLES = {
    "best": "bold", "yes": "bold", "quiet": "dim", "running": "green", "diverged": "red",
    "interrupted": "yellow", "done": "dim",
}  # fmt: skip
_NARROWEST = 10
_NO_BREAK = "\N{NO-BREAK SPACE}"
_LONG_TEXT = 16
"""Least width of a column of long texts."""


def render(parts: Iterable[Table | RenderableType | None], width: int) -> Group:
    """Put tables and texts one below the other."""
    shown: list[RenderableType] = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, Table):
            shown += to_rich(part, width)
        else:
            shown.append(Text(plain(part)) if isinstance(part, str) else part)
    return Group(*shown)


def say(console: Console, text: str) -> None:
    """Print one line, however long, as it is."""
    console.print(Text(plain(text)), soft_wrap=True, highlight=False)


def bold(text: str) -> Text:
    """Return a headline."""
    return Text(plain(text), style="bold")


def to_rich(table: Table, width: int) -> Iterator[RenderableType]:
    """Render a table with its title and caption.

    Numbers are never broken and texts are folded. Columns that do not fit continue below, beside
    the leading columns again.
    """
    if table.title:
        yield Text(f"{plain(table.title)}\n", style="bold")
    table = table._replace(heads=tuple(map(plain, table.heads)))
    columns = [_measured(table, i, width) for i in range(len(table.heads))]
    gap = 1 if not _fits(columns, 2, width) and _fits(columns, 1, width) else 2
    names, left = columns[: table.words], columns[table.words :]
    while True:
        count = 1
        while count < len(left) and _fits([*names, *left[: count + 1]], gap, width):
            count += 1
        yield _block(table, [*names, *left[:count]], gap, width)
        yield Text()
        left = left[count:]
        if not left:
            break
    for words in filter(None, (table.caption, table.advice)):
        yield Text(f"{plain(words)}\n", style="dim")


class _Column(NamedTuple):
    """A column and its widths."""

    position: int
    is_text: bool
    least: int
    wanted: int


def _measured(table: Table, index: int, width: int) -> _Column:
    is_text, head = table.is_text(index), table.heads[index]
    cells = [plain(row[index].text) for row in table.rows]
    least = _widest(cells)
    if is_text:
        # Names take three lines or so; other texts break after commas where that is possible.
        parts = [part for text in cells for part in (_unbroken(text) if index else text).split(" ")]
        room = _LONG_TEXT if index else least * 2 // 5
        least = min(least, max(min(_widest(parts) + (not index), width // 2), room))
    least = max(least, _widest(_whole_shares(head).split(" ")))
    return _Column(index, is_text, least, _widest([head, *cells]))


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _unbroken(text: str, room: int = 100) -> str:
    """Keep the items of an enumeration whole, if all are short."""
    items = text.split(", ")
    if len(items) < 2 or max(map(len, items)) >= min(room, _LONG_TEXT * 3 // 2):
        return text
    return ", ".join(item.replace(" ", _NO_BREAK) for item in items)


def _whole_shares(text: str) -> str:
    return text.replace(" %", f"{_NO_BREAK}%")


def _fits(columns: Sequence[_Column], gap: int, width: int) -> bool:
    return sum(column.least for column in columns) + gap * (len(columns) - 1) <= width


def _block(table: Table, columns: Sequence[_Column], gap: int, width: int) -> RichTable:
    out = RichTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0)
    )
    widths = _widths(columns, width - gap * (len(columns) - 1))
    for column, room in zip(columns, widths, strict=True):
        head = Text(_folded(table.heads[column.position], room))
        justify = "left" if column.is_text else "right"
        out.add_column(head, justify=justify, overflow="fold", width=room, vertical="top")  # type: ignore[arg-type]
    for row in table.rows:
        cells = []
        for column, room in zip(columns, widths, strict=True):
            cell = row[column.position]
            indent = " " if column.position == 0 else ""
            text = _folded(plain(cell.text), room, indent) if column.is_text else plain(cell.text)
            cells.append(Text(text, style=_STYLES.get(cell.kind, "")))
        out.add_row(*cells)
    return out


def _folded(text: str, room: int, indent: str = "") -> str:
    """Break a text after commas where that is possible, else between words."""
    whole = _whole_shares(_unbroken(text, room))
    lines = textwrap.wrap(whole, max(room, 2), subsequent_indent=indent)
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Share the width: first the least of every column, then more to texts, then to heads."""
    widths = [column.least for column in columns]
    while sum(widths) > room:
        texts = [i for i, c in enumerate(columns) if c.is_text and widths[i] > _NARROWEST]
        if not texts:
            break
        widths[max(texts, key=lambda i: (i > 0, widths[i]))] -= 1
    for _ in range(room - sum(widths)):
        growing = [i for i, column in enumerate(columns) if widths[i] < column.wanted]
        if growing:
            widths[min(growing, key=lambda i: (not columns[i].is_text, widths[i]))] += 1
    return widths
