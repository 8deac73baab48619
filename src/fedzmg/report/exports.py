"""Tables and figures of a report as files of their own: for papers, slides and spreadsheets.

Tables are written as Markdown, LaTeX and CSV (with full precision), figures as PNG, SVG and PDF.
The same outcome gives the same bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.files import write_atomic
from fedzmg.report import sheets
from fedzmg.report.outcome import Outcome
from fedzmg.report.page import render, slug
from fedzmg.report.reading import Material
from fedzmg.report.sheets import Sheet
from fedzmg.report.svg import MINUS, NONE

PAGE = "report.html"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", MINUS: r"$-$", NONE: "--", "∞": r"$\infty$", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def markdown(sheet: Sheet) -> str:
    """A table in Markdown, best value and significant p-values in bold.

    >>> print(markdown(sheets.Sheet("k", "T", ("a", "b"), [[sheets.Cell("x"), sheets.Cell("1")]],
    ...     "", [])), end="")
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
    return "\n".join(lines) + "\n" + (f"\n{sheet.caption}\n" if sheet.caption else "")


def latex(sheet: Sheet) -> str:
    """A table in LaTeX; it needs the package booktabs."""
    columns = "".join("l" if i < sheet.words else "r" for i in range(len(sheet.heads)))
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        f"  \\caption{{{tex(sheet.title)}. {tex(sheet.caption)}}}",
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


def write(material: Material, outcomes: Sequence[Outcome], out: Path) -> Path:
    """Write the page.

    Args:
        material: what was read.
        outcomes: an outcome for each study.
        out: a directory; it is made.

    Returns:
        The page's path.

    Raises:
        InputError: if it cannot be written.
    """
    path = out / PAGE
    _write(path, render(material, outcomes).encode())
    return path


def write_tables(material: Material, outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Write every table three times, below ``tables``.

    Raises:
        InputError: if one cannot be written.
    """
    written = []
    for name, sheet in _sheets(material, outcomes):
        for suffix, make in (("md", markdown), ("tex", latex), ("csv", comma_separated)):
            path = out / "tables" / f"{name}.{suffix}"
            _write(path, make(sheet).encode())
            written.append(path)
    return written


def write_figures(material: Material, outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Write every figure as PNG, SVG and PDF, below ``figures``.

    Raises:
        InputError: if one cannot be written.
    """
    # Drawing takes its time to load, and a page alone does not need it.
    from fedzmg.report import grids, plots

    written = []
    jobs: list[tuple[str, Any]] = []
    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        jobs += [(prefix + name, figure) for name, figure in plots.study_figures(outcome)]
    for i, extra in enumerate(material.grids):
        before = f"grid{i + 1}-" if len(material.grids) > 1 else "grid-"
        for name in extra.content.get("algorithms", {}):
            jobs.append((before + slug(name), grids.figure(extra.content, name)))
    for stem, figure in jobs:
        for suffix in ("png", "svg", "pdf"):
            path = out / "figures" / f"{stem}.{suffix}"
            _write(path, plots.rendered(figure, suffix))
            written.append(path)
    return written


def _sheets(material: Material, outcomes: Sequence[Outcome]) -> Iterable[tuple[str, Sheet]]:
    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        for make in (sheets.scores, sheets.finals, sheets.traffic, sheets.settings):
            sheet = make(outcome)
            yield prefix + sheet.key, sheet
        for rare in (sheets.thresholds(outcome), sheets.beside_paper(outcome)):
            if rare is not None:
                yield prefix + rare.key, rare
    for i, extra in enumerate(material.heterogeneity):
        after = f"-{i + 1}" if len(material.heterogeneity) > 1 else ""
        yield f"heterogeneity{after}", sheets.heterogeneity(extra.content, None)


def _prefixes(outcomes: Sequence[Outcome]) -> list[str]:
    """What tells the files of several studies apart."""
    if len(outcomes) == 1:
        return [""]
    return [f"{i + 1}-{slug(outcome.study.name)}-" for i, outcome in enumerate(outcomes)]


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; choose another place with --out"
        ) from None


def _bar(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _pipe(text: str) -> str:
    return text.replace("|", r"\|")
