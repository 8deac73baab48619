"""The files of ``fedzmg theory``: figures, and a page that has them in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedzmg.errors import InputError
from fedzmg.report.html.theory import Picture, page
from fedzmg.report.tables.theory import Finding
from fedzmg.report.writing import check_place, write

ANOTHER_FILE = "choose another file"


def check_places(out: Path | None, html: Path | None) -> None:
    """Find out before the work whether figures and page can be written.

    Args:
        out: directory of the figures; None: none are asked for.
        html: file of the page.

    Raises:
        InputError: if one of them cannot.
    """
    if out is not None:
        check_place(out)
    if html is not None and html.is_dir():
        raise InputError(f"cannot write {html}: it is a directory; {ANOTHER_FILE}")
    if html is not None:
        check_place(html.parent, ANOTHER_FILE)


def write_figures(findings: Sequence[Finding], out: Path) -> list[Path]:
    """Write every figure as PNG and SVG.

    Raises:
        InputError: if one cannot be written.
    """
    from fedzmg.report.plots.style import save
    from fedzmg.report.plots.theory import figures

    written: list[Path] = []
    for finding in findings:
        for name, figure in figures(finding).items():
            written += save(figure, out / name)
    return written


def write_page(findings: Sequence[Finding], path: Path) -> None:
    """Write the page.

    Raises:
        InputError: if it cannot be written.
    """
    pictures = {finding["id"]: _pictures(finding) for finding in findings}
    write(path, page(findings, pictures).encode(), ANOTHER_FILE)


def _pictures(finding: Finding) -> list[Picture]:
    from fedzmg.report.plots.style import rendered
    from fedzmg.report.plots.theory import figures

    return [
        Picture(name, figure.axes[0].get_title(loc="left"), rendered(figure, "svg"))
        for name, figure in figures(finding).items()
    ]
