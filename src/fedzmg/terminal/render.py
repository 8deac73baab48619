"""Tables and text on a terminal, never read as markup and without control characters."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from fedzmg.plain_text import plain, printable
from fedzmg.report.tables.table import Table

_STYLES = {
    "best": "bold", "yes": "bold", "quiet": "dim", "running": "green", "diverged": "red",
    "interrupted": "yellow", "done": "dim",
}  # fmt: skip
_NARROWEST, _GAP = 10, 2
_LONG_TEXT = 16  # least width of a column of long texts


def render(parts: Iterable[Table | RenderableType | None], width: int) -> Group:
    """Put tables and texts one below the other."""
    shown: list[RenderableType] = []
    for part in parts:
        if isinstance(part, Table):
            shown += to_rich(part, width)
        elif part is not None:
            shown.append(Text(plain(part)) if isinstance(part, str) else part)
    return Group(*shown)


class Terminal(Console):
    """Console of everything that is printed, without the control characters of any text."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render without control characters, which only rich itself may send."""
        for segment in super().render(renderable, options):
            text = segment.text
            clean = segment.control or text == "\n" or text.isprintable()
            yield segment if clean else segment._replace(text=printable(text))

    def say(self, text: object) -> None:
        """Print one line, however long."""
        self.print(Text(plain(text)), soft_wrap=True)


def print_line(text: object, *, err: bool = False) -> None:
    """Print one line on standard output, or on standard error."""
    Terminal(stderr=err).say(text)


def print_text(text: str, *, err: bool = False) -> None:
    """Print lines that may be very long, such as JSON."""
    typer.echo(printable(text), err=err)


def bold(text: str) -> Text:
    """Return a headline."""
    return Text(plain(text), style="bold")


class _Column(NamedTuple):
    head: str
    cells: list[Text]
    is_text: bool
    least: int
    wanted: int


def to_rich(table: Table, width: int) -> Iterator[RenderableType]:
    """Render a table; texts fold, empty columns go, columns that do not fit continue below."""
    if table.title:
        yield from (bold(table.title), Text())
    columns = [_column(table, i, width) for i in range(len(table.heads))]
    names = columns[: table.words]
    left = [column for column in columns[table.words :] if any(map(len, column.cells))]
    while True:
        count, taken = 1, sum(column.least + _GAP for column in [*names, *left[:1]])
        while count < len(left) and (taken := taken + left[count].least + _GAP) <= width + _GAP:
            count += 1
        yield _block([*names, *left[:count]], width)
        yield Text()
        left = left[count:]
        if not left:
            break
    if table.caption:
        yield Text(f"{plain(table.caption)}\n", style="dim")


def _column(table: Table, index: int, width: int) -> _Column:
    head, is_text = plain(table.heads[index]), table.is_text(index)
    cells = [row[index] for row in table.rows]
    texts = [Text(plain(cell.text), _STYLES.get(cell.kind, "")) for cell in cells]
    wanted = least = max((text.cell_len for text in texts), default=0)
    if is_text:
        # Names take three lines or so.
        longest = _longest_word(text.plain for text in texts) + (not index)
        room = _LONG_TEXT if index else least * 2 // 5
        least = min(least, max(min(longest, width // 2), room))
    least = max(least, _longest_word([head]))
    return _Column(head, texts, is_text, least, max(wanted, cell_len(head)))


def _longest_word(texts: Iterable[str]) -> int:
    return max((cell_len(word) for text in texts for word in text.split(" ")), default=0)


def _block(columns: Sequence[_Column], width: int) -> RichTable:
    out = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    widths = _widths(columns, width - _GAP * (len(columns) - 1))
    for column, room in zip(columns, widths, strict=True):
        justify = "left" if column.is_text else "right"
        out.add_column(Text(column.head), justify=justify, overflow="fold", width=room)  # type: ignore[arg-type]
    for name, *cells in zip(*(column.cells for column in columns), strict=True):
        # Lines of a name after its first are indented.
        lines = textwrap.wrap(name.plain, max(widths[0], 2), subsequent_indent=" ")
        out.add_row(Text("\n".join(lines), name.style), *cells)
    return out


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
