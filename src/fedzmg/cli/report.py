"""``fedzmg report``: a page, tables and figures from run directories."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run directories, or directories that hold them."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory to write to [default: DIR/report].")
    ] = None,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Leave out the files of tables and figures.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page about runs, and its tables and figures as files."""
    from fedzmg.report import exports, reading
    from fedzmg.report.outcome import judge

    material = reading.read(directories)
    outcomes = [judge(study) for study in material.studies]
    place = out or directories[0] / "report"
    page = exports.write(material, outcomes, place)
    typer.echo(f"page    {page}")
    if not page_only:
        tables = exports.write_tables(material, outcomes, place)
        figures = exports.write_figures(material, outcomes, place)
        if tables:
            typer.echo(f"tables  {place / 'tables'} ({len(tables)} files)")
        if figures:
            typer.echo(f"figures {place / 'figures'} ({len(figures)} files)")
    for note in material.notes:
        typer.echo(f"fedzmg: {note}", err=True)
    if open_:
        webbrowser.open(page.resolve().as_uri())
