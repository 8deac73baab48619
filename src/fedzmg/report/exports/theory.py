"""Files of ``fedzmg theory``: figures, and a page that embeds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedzmg.errors import InputError
from fedzmg.report.tables.theory import Finding
from fedzmg.report.writing import check_place, write

ANOTHER_FILE = "choose another file"


def check_places(out: Path | None, html: Path | None) -> None:
    """Check before the work that figures and page can be written.

    Args:
        out: directory of the figures; None for no figures.
        html: file of the page; None for no page.

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
    """Write every figure as PNG and SVG and return their paths.

    Raises:
        InputError: if one cannot be written.
    """
    from fedzmg.report.figures import save, theory

    drawn = [item for finding in findings for item in theory(finding).items()]
    return [path for name, chart in drawn for path in save(chart, out / name)]


def write_page(findings: Sequence[Finding], path: Path) -> None:
    """Write the page.

    Raises:
        InputError: if it cannot be written.
    """
    from fedzmg.report.figures import theory
    from fedzmg.report.html.theory import page

    charts = {str(finding["id"]): list(theory(finding).values()) for finding in findings}
    write(path, page(findings, charts).encode(), ANOTHER_FILE)
