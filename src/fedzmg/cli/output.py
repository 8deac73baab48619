"""Progress and messages of commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console

from fedzmg.errors import InputError
from fedzmg.results.formatting import plain as printable

if TYPE_CHECKING:  # a command that only prints help does without torch
    from fedzmg.experiment.specs.study import StudySpec
    from fedzmg.tasks.task import Task
    from fedzmg.trackers import Make, Naming, Tracking

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
UNFINISHED = 75
"""Exit code after the time limit: run the same command again."""


class Work(NamedTuple):
    """A task to train on, its directory and the receivers of progress."""

    task: Task
    directory: Path
    trackers: Mapping[str, Make]
    as_json: bool

    @property
    def console(self) -> Console:
        """The terminal; standard error if the result is JSON."""
        return Console(stderr=self.as_json)

    @contextlib.contextmanager
    def shown(
        self,
        packs: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
        naming: Naming | None = None,
    ) -> Iterator[Tracking]:
        """Show rounds on the terminal and to trackers; report the time limit."""
        from fedzmg import trackers
        from fedzmg.experiment.control import TimeLimitReached
        from fedzmg.terminal.live import Display

        try:
            with (
                Display(self.console, self.task.metric.name, packs, sizes) as display,
                trackers.Tracking(self.trackers, self.directory, display, naming) as progress,
            ):
                yield progress
        except TimeLimitReached as error:
            say(f"{error}, run the same command again to continue")
            raise SystemExit(UNFINISHED) from None

    def train_study(
        self, spec: StudySpec, *, max_minutes: float | None = None, grow: bool = False
    ) -> None:
        """Train a study and show its scores and curves."""
        from fedzmg.experiment.studies.study import run_study, study_packs
        from fedzmg.report import figures
        from fedzmg.terminal import views

        directory = self.directory
        sizes = {label: len(names) for label, names in study_packs(spec, self.task).items()}
        with self.shown(dict.fromkeys(sizes, 1), sizes) as progress:
            result = run_study(
                spec, directory, task=self.task, progress=progress, max_minutes=max_minutes,
                grow=grow,
            )  # fmt: skip
        chart = figures.curves(result)
        written = [] if chart is None else figures.save(chart, directory / "curves")
        if self.as_json:
            typer.echo(json.dumps({**result.as_dict(), "directory": str(directory)}))
            return
        console = self.console
        console.print(views.study(result, console.width))
        if not grow:
            place("time", f"{sum(run.log.seconds for run in result.study.runs):,.0f} s")
        for what, path in zip(("figure", ""), written, strict=False):
            place(what, path)
        place("runs" if grow else "study", directory)


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
    from fedzmg.terminal import render

    render.say(console, text)


def check_file(path: Path, option: str) -> None:
    """Check before long work that the file of an option can be written."""
    from fedzmg.report.writing import check_place

    remedy = f"choose another {option}"
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; {remedy}, such as NAME.json")
    check_place(path.parent, remedy)
