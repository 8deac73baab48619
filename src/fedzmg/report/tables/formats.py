"""A table as Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from fedzmg.report.tables.sheet import Sheet
from fedzmg.results.formatting import MINUS, NONE

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", MINUS: r"$-$", NONE: "--", "∞": r"$\infty$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def markdown(sheet: Sheet) -> str:
    """A table in Markdown, best value and significant p-values in bold.

    >>> from fedzmg.report.tables.sheet import Cell
    >>> print(markdown(Sheet("k", "T", ("a", "b"), [[Cell("x"), Cell("1")]], "", [])), end="")
    ### T
    <BLANKLINE>
    | a | b |
    |:--|--:|
    | x | 1 |
    """
    lines = [f"### {sheet.title}", "", _bar(map(_pipe, sheet.heads))]
    ends = [":--" if i < sheet.words else "--:" for i in range(len(sheet.heads))]
    lines.append("|" + "|".join(ends) + "|")
    for row in sheet.rows:
        cells = (_pipe(c.text) for c in row)
        lines.append(
            _bar(
                f"**{text}**" if cell.kind in ("best", "yes") else text
                for cell, text in zip(row, cells, strict=True)
            )
        )
    return (
        "\n".join(lines)
        + "\n"
        + "".join(f"\n{words}\n" for words in (sheet.caption, sheet.advice) if words)
    )


def latex(sheet: Sheet) -> str:
    """A table in LaTeX; it needs the package booktabs."""
    columns = "".join("l" if i < sheet.words else "r" for i in range(len(sheet.heads)))
    words = " ".join(filter(None, (f"{sheet.title}.", sheet.caption, sheet.advice)))
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        f"  \\caption{{{tex(words)}}}",
        f"  \\begin{{tabular}}{{{columns}}}",
        "    \\toprule",
        "    " + " & ".join(map(tex, sheet.heads)) + r" \\",
        "    \\midrule",
    ]
    for row in sheet.rows:
        cells = [
            f"\\textbf{{{tex(cell.text)}}}" if cell.kind in ("best", "yes") else tex(cell.text)
            for cell in row
        ]
        lines.append("    " + " & ".join(cells) + r" \\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def comma_separated(sheet: Sheet) -> str:
    """The numbers behind a table, with all their digits; empty where there is none."""
    text = io.StringIO()
    if sheet.records:
        writer = csv.DictWriter(text, fieldnames=list(sheet.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sheet.records)
    return text.getvalue()


def tex(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> tex("86.74 ± 1 %, d_z")
    '86.74 $\\pm$ 1 \\%, d\\_z'
    """
    return "".join(_LATEX.get(character, character) for character in text)


def _bar(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _pipe(text: str) -> str:
    return text.replace("|", r"\|")
