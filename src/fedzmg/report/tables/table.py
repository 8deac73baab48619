"""Tables as data, which page and terminal show, and their CSV, JSON, Markdown and LaTeX."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Self

from fedzmg.results.formatting import MINUS, NONE
from fedzmg.storage.formats import json_nulls

Record = dict[str, float | int | str | bool | None]

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", MINUS: r"$-$", NONE: "--", "∞": r"$\infty$", "<": r"$<$", ">": r"$>$",
})  # fmt: skip


class Cell(NamedTuple):
    """Text of a cell, and the number to sort it by."""

    text: str
    value: float | None = None
    kind: str = ""  # ``best``, ``yes`` (significant), ``quiet`` or ``words`` (long text)


NOTHING = Cell(NONE, None, "quiet")


def words(text: str, value: float | None = None) -> Cell:
    """Make a cell of long text."""
    return Cell(text, value, "words")


class Column(NamedTuple):
    """A column of a table and of its records."""

    head: str  # empty for a column of the records only
    key: str  # name in the records; empty for a column of the table only
    value: str | Callable[[Any], Any]  # attribute or function of an item, which may return a cell
    text: Callable[[Any], str] = str

    def show(self, item: Any) -> tuple[Cell, Any]:
        """Return the cell and the record's value of an item."""
        value = (attrgetter(self.value) if isinstance(self.value, str) else self.value)(item)
        if isinstance(value, Cell):
            return value, None if value.kind == "quiet" else value.value
        if value is None or isinstance(value, str):
            return NOTHING if value is None else Cell(value), value
        return Cell(self.text(value), value), value


class Table(NamedTuple):
    """Cells for readers, records for programs."""

    key: str
    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    records: Sequence[Record] = ()  # values with full precision, one flat record per row or finer
    words: int = 1  # number of leading text columns

    @classmethod
    def of(
        cls, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
    ) -> Self:
        """Make a table of plain texts."""
        cells = [[Cell(text) for text in row] for row in rows]
        return cls("", title, tuple(heads), cells, words=words)

    @classmethod
    def build(
        cls, key: str, title: str, columns: Iterable[Column], items: Iterable[Any],
        caption: str = "", words: int = 1,
    ) -> Self:  # fmt: skip
        """Make a row and a record per item."""
        columns = [column for column in columns if column.head or column.key]
        lines = [[(column, *column.show(item)) for column in columns] for item in items]
        rows = [[cell for column, cell, _ in line if column.head] for line in lines]
        records = [{column.key: value for column, _, value in line if column.key} for line in lines]
        heads = tuple(column.head for column in columns if column.head)
        return cls(key, title, heads, rows, caption, records, words)

    def is_text(self, column: int) -> bool:
        """Return True for a column of texts, False for one of numbers."""
        return column < self.words or any(row[column].kind == "words" for row in self.rows)

    def _styled(
        self, left: str, right: str, escape: Callable[[str], str], bold: str
    ) -> tuple[list[str], list[list[str]]]:
        """Return the side of every column, and escaped texts, the best of them bold."""
        sides = [left if self.is_text(i) else right for i in range(len(self.heads))]
        cells = [
            [bold.format(escape(c.text)) if c.kind in ("best", "yes") else escape(c.text)
             for c in row]
            for row in self.rows
        ]  # fmt: skip
        return sides, [list(map(escape, self.heads)), *cells]


def to_csv(table: Table) -> str:
    """Render the records, with all digits; a missing value is empty."""
    text = io.StringIO()
    if table.records:
        writer = csv.DictWriter(text, fieldnames=list(table.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.records)
    return text.getvalue()


def to_json(table: Table) -> str:
    """Render title, caption and records; a value that is not finite becomes null."""
    words = {"title": table.title, "caption": table.caption}
    return json.dumps({**words, "records": json_nulls(list(table.records))}, indent=1) + "\n"


def to_markdown(table: Table) -> str:
    """Render the cells; the best value and significant p-values are bold."""
    sides, rows = table._styled(":--", "--:", lambda text: text.replace("|", r"\|"), "**{}**")
    heads, *lines = (f"| {' | '.join(row)} |" for row in rows)
    lines = [f"### {table.title}", "", heads, f"|{'|'.join(sides)}|", *lines]
    return "\n".join([*lines, *(["", table.caption] if table.caption else []), ""])


def to_latex(table: Table) -> str:
    """Render the cells for the package booktabs."""
    sides, rows = table._styled("l", "r", tex, r"\textbf{{{}}}")
    words = " ".join(filter(None, (f"{table.title}.", table.caption)))
    heads, *lines = (f"    {' & '.join(row)} \\\\" for row in rows)
    return "\n".join([
        r"% needs \usepackage{booktabs}", r"\begin{table}", rf"  \caption{{{tex(words)}}}",
        rf"  \begin{{tabular}}{{{''.join(sides)}}}", r"    \toprule", heads, r"    \midrule",
        *lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


def tex(text: str) -> str:
    """Escape a text for LaTeX."""
    return text.translate(_LATEX)
