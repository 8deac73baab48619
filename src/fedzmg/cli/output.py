"""What commands say besides their results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer
from rich.console import Console

from fedzmg.errors import InputError
from fedzmg.results.formatting import plain as printable

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextlib.contextmanager
def mistakes_in(file: Path | str, settings: Iterable[str] | None) -> Iterator[None]:
    """Say of mistakes in a file, or in what ``--set`` makes of it, where they are."""
    try:
        yield
    except InputError as error:
        given = "".join(f" --set {text}" for text in settings or [])
        raise InputError(f"{file}{given}: {error}") from None


def say(*lines: str) -> None:
    """Something the user should know, apart from results that a program may read."""
    for line in lines:
        typer.echo(f"fedzmg: {printable(line)}", err=True)


def place(what: str, path: Path | str, *, err: bool = False) -> None:
    """Where something is: one line however long, as a path is copied whole."""
    typer.echo(f"{what:<7} {printable(path)}", err=err)


def plain(console: Console, text: str) -> None:
    """Print a line as it is, without markup, line breaks and control characters."""
    from fedzmg.report.terminal.render import say as print_line

    print_line(console, text)


def check_file(path: Path, option: str) -> None:
    """Find out before long work whether a file can be written; folders above it may be missing.

    Args:
        path: the file; one that is there will be replaced.
        option: what the user calls it.

    Raises:
        InputError: if it cannot.
    """
    from fedzmg.report.writing import check_place

    remedy = f"choose another {option}"
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; {remedy}, such as NAME.json")
    check_place(path.parent, remedy)
