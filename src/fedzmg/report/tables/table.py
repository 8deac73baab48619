"""Tables as data, and the files they become: CSV, JSON, Markdown and LaTeX.

The page's templates and :mod:`fedzmg.terminal.render` read the same :class:`Table`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from fedzmg.results.formatting import MINUS, NONE
from fedzmg.storage.formats import json_nulls

Value = float | int | str | bool | None
Record = dict[str, Value]

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", MINUS: r"$-$", NONE: "--", "∞": r"$\infty$", "<": r"$<$", ">": r"$>$",
})  # fmt: skip


class Cell(NamedTuple):
    """Text of a cell, and the number to sort it by."""

    text: str
    value: float | None = None
    kind: str = ""
    """``best``, ``yes`` (significant), ``quiet`` or ``words`` (long text)."""

    @property
    def bold(self) -> bool:
        """True for the best value and for significant p-values."""
        return self.kind in ("best", "yes")


NOTHING = Cell(NONE, None, "quiet")
"""A cell without a number."""


class Table(NamedTuple):
    """Cells for readers, records for programs."""

    key: str
    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    records: Sequence[Record] = ()
    """Values with full precision, one flat record per row or finer."""
    words: int = 1
    """Number of leading text columns."""
    advice: str = ""
    """Guide to reading the table."""

    @classmethod
    def of(
        cls, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
    ) -> Self:
        """Make a table of plain texts."""
        return cls("", title, tuple(heads), [[Cell(text) for text in row] for row in rows],
                   words=words)  # fmt: skip

    def is_text(self, column: int) -> bool:
        """Return True for a column of texts, False for one of numbers."""
        return column < self.words or any(row[column].kind == "words" for row in self.rows)


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
    """Render the cells; the best value and significant p-values are bold.

    >>> print(to_markdown(Table.of("T", ("a", "b"), [("x", "1")])), end="")
    ### T
    <BLANKLINE>
    | a | b |
    |:--|--:|
    | x | 1 |
    """
    sides = [":--" if table.is_text(i) else "--:" for i in range(len(table.heads))]
    rows = [[f"**{c.text}**" if c.bold else c.text for c in row] for row in table.rows]
    heads, *lines = (
        "| " + " | ".join(text.replace("|", r"\|") for text in row) + " |"
        for row in (table.heads, *rows)
    )
    lines = [f"### {table.title}", "", heads, f"|{'|'.join(sides)}|", *lines]
    for words in filter(None, (table.caption, table.advice)):
        lines += ["", words]
    return "\n".join(lines) + "\n"


def to_latex(table: Table) -> str:
    """Render the cells for the package booktabs."""
    sides = "".join("l" if table.is_text(i) else "r" for i in range(len(table.heads)))
    words = " ".join(filter(None, (f"{table.title}.", table.caption, table.advice)))
    heads, *rows = (
        "    " + " & ".join(cells) + r" \\"
        for cells in (
            map(tex, table.heads),
            *([rf"\textbf{{{tex(c.text)}}}" if c.bold else tex(c.text) for c in row]
              for row in table.rows),
        )
    )  # fmt: skip
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        rf"  \caption{{{tex(words)}}}",
        rf"  \begin{{tabular}}{{{sides}}}",
        r"    \toprule",
        heads,
        r"    \midrule",
        *rows,
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def tex(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> tex("86.74 ± 1 %, d_z")
    '86.74 $\\pm$ 1 \\%, d\\_z'
    """
    return text.translate(_LATEX)
