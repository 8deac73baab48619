"""Messages of commands besides their results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fedzmg.errors import InputError
from fedzmg.results.formatting import plain as printable

if TYPE_CHECKING:
    from fedzmg.results.study_result import StudyResult

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@contextlib.contextmanager
def mistakes_in(file: Path | str, settings: Iterable[str] | None) -> Iterator[None]:
    """Add the file and its ``--set`` options to errors."""
    try:
        yield
    except InputError as error:
        given = "".join(f" --set {text}" for text in settings or [])
        raise InputError(f"{file}{given}: {error}") from None


def say(*lines: str) -> None:
    """Print lines for the user on standard error."""
    for line in lines:
        typer.echo(f"fedzmg: {printable(line)}", err=True)


def place(what: str, path: Path | str, *, err: bool = False) -> None:
    """Print the path of something in one line."""
    typer.echo(f"{what:<7} {printable(path)}", err=err)


def plain(console: Console, text: str) -> None:
    """Print a line as it is, without markup, line breaks and control characters."""
    from fedzmg.report.terminal.render import say as print_line

    print_line(console, text)


def check_file(path: Path, option: str) -> None:
    """Check before long work that a file can be written; its directories may be missing.

    Args:
        path: the file; an existing one will be replaced.
        option: its name on the command line.

    Raises:
        InputError: if it cannot.
    """
    from fedzmg.report.writing import check_place

    remedy = f"choose another {option}"
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; {remedy}, such as NAME.json")
    check_place(path.parent, remedy)


def save_curves(result: StudyResult, directory: Path) -> list[Path]:
    """Draw the curves of a study into its directory."""
    from fedzmg.report import figures

    chart = figures.curves(result)
    return [] if chart is None else figures.save(chart, directory / "curves")
