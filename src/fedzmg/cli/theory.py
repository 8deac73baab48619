"""``fedzmg theory``: check the claims of the theory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import Json

NOT_REPRODUCED = 1
"""Exit code if a derived number disagrees with its measurement."""


def theory(
    checks: Annotated[
        list[str] | None, typer.Argument(help="T1 to T12, E1 to E9.", show_default="all")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Write figures as PNG and SVG.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for figures.")] = Path("runs/theory"),
    html: Annotated[
        Path | None, typer.Option(help="Write a page with tables and figures to this file.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions and steps: faster and coarser.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the theory: predicted value, measured value and verdict of every claim.

    Exit code 1 if a derived value is not reproduced.
    """
    from fedzmg.report.exports import theory as files
    from fedzmg.report.tables.theory import markdown, overview
    from fedzmg.report.terminal import views
    from fedzmg.report.terminal.render import render
    from fedzmg.report.writing import staged
    from fedzmg.theory import FULL, QUICK, run

    files.check_places(out if plot else None, html)
    quiet = as_json or as_markdown
    console = Console(stderr=quiet)
    findings, begun = [], time.perf_counter()
    for found in run(checks or [], QUICK if quick else FULL):
        finding = found.as_dict()
        findings.append(finding)
        if quiet:
            output.plain(console, f"{found.id}: {found.verdict}")
        else:
            console.print(views.finding(finding, console.width))
    seconds = time.perf_counter() - begun
    # Before files: writing them may fail.
    if as_json:
        typer.echo(json.dumps({"findings": findings, "seconds": round(seconds, 3)}))
    elif as_markdown:
        typer.echo(markdown(findings), nl=False)
    if html is not None:
        files.write_page(findings, html)
        output.place("page", html, err=quiet)
    if plot:
        with staged(out, "theory") as folder:
            drawn = files.write_figures(findings, folder)
        for path in drawn:
            output.place("figure", out / path.name, err=quiet)
    if len(findings) > 1 and not quiet:
        console.print(render([overview(findings)], console.width))
    output.plain(console, views.findings_summary(findings, seconds))
    if any(finding["verdict"] == "not reproduced" for finding in findings):
        raise SystemExit(NOT_REPRODUCED)
