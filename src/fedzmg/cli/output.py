"""What commands say besides their results."""

from __future__ import annotations

from pathlib import Path

import typer

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def say(*lines: str) -> None:
    """Something the user should know, apart from results that a program may read."""
    for line in lines:
        typer.echo(f"fedzmg: {line}", err=True)


def place(what: str, path: Path | str, *, err: bool = False) -> None:
    """Where something is: one line however long, as a path is copied whole."""
    typer.echo(f"{what:<7} {path}", err=err)
