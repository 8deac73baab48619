"""``fedzmg report``: a page, tables and figures from directories of results."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedzmg.cli import output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedzmg.report.writing import Cleared


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Runs, studies, grids, what 'fedzmg data describe' wrote, or "
            "directories that hold some.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory to write to.", show_default="DIR/report")
    ] = None,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Leave out the files of tables and figures.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page about runs, grids or clients, and its tables and figures.

    Nothing is trained. Overview figures of the directories are redrawn, bit for bit.
    """
    from fedzmg.report.exports.report import publish
    from fedzmg.results import reading
    from fedzmg.results.study_result import study_result

    material = reading.read(directories)
    outcomes = [study_result(study) for study in material.studies]
    place = out or directories[0] / "report"
    written = publish(material, outcomes, place, page_only=page_only)
    output.place("page", written.page)
    if written.tables:
        output.place("tables", f"{place / 'tables'} ({len(written.tables)} files)")
    if written.figures:
        output.place("figures", f"{place / 'figures'} ({len(written.figures)} files)")
    output.say(*material.notes, *_about(written.cleared))
    if open_:
        webbrowser.open(written.page.resolve().as_uri())


def _about(cleared: Cleared) -> Iterator[str]:
    if cleared.removed:
        yield f"{len(cleared.removed)} files of an earlier report there are removed"
    for name in cleared.kept:
        yield f"{name} of an earlier report was changed since and is left alone"
