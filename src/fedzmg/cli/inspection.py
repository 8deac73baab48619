"""Commands that train nothing new: list, watch, diff, verify, report, keep and export."""

from __future__ import annotations

import json
import math
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from fedzmg.cli import output
from fedzmg.cli.options import Json
from fedzmg.errors import unknown

if TYPE_CHECKING:
    from fedzmg.results.watch import Watch, Work

DIFFERENT = 1


def watch(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run, study or grid, or some.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the state once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until all is trained, also while no process works.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow work in another terminal: states, metrics, best so far, time left; only reads.

    It ends when all is trained, or when no process works on it any more.
    """
    from fedzmg.results.watch import Watch
    from fedzmg.terminal import watch as watch_view

    found, console = Watch(directory), Console()
    works = found.look()
    if as_json:
        _json_lines(found, works, every, once=once, wait=wait)
    elif once:
        console.print(watch_view.screen(works, console.width))
    else:
        try:
            _follow(found, works, every, console, wait=wait)
        except KeyboardInterrupt:  # the usual way to leave
            raise SystemExit(output.INTERRUPTED) from None


def _ended(works: list[Work], wait: bool) -> bool:
    """Return True if no process is at work and, with ``wait``, all is complete."""
    return not any(work.alive or (wait and not work.complete) for work in works)


def _json_lines(found: Watch, works: list[Work], every: float, *, once: bool, wait: bool) -> None:
    """Print the state as a line of JSON after every look."""
    while True:
        typer.echo(json.dumps({"works": [work.as_dict() for work in works]}, allow_nan=False))
        if once or _ended(works, wait):
            return
        time.sleep(every)
        works = found.look()


def _follow(found: Watch, works: list[Work], every: float, console: Console, *, wait: bool) -> None:
    from fedzmg.terminal import watch as watch_view
    from fedzmg.terminal.render import say

    if console.is_terminal:
        first = watch_view.fitted(works, console)
        with Live(first, console=console, auto_refresh=False) as live:
            while not _ended(works, wait):
                time.sleep(every)
                works = found.look()
                live.update(watch_view.fitted(works, console), refresh=True)
        return
    shown: list[str] = []
    while True:
        lines = [watch_view.line(work) for work in works]
        for line in lines:
            if line not in shown:
                say(console, f"{time.strftime('%H:%M:%S')} {line}")
        shown = lines
        if _ended(works, wait):
            return
        time.sleep(every)
        works = found.look()


def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A run, study or grid.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    only: Annotated[
        str | None,
        typer.Option(
            help="What to compare, comma-separated: spec, options, versions, data, curves, scores, "
            "runs.",
            show_default="all",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs, studies or grids: settings, versions, data, curves, scores.

    Exit code 0 without a difference, 1 with one, 2 for an error.
    """
    from fedzmg.results.diff import aspects, compare
    from fedzmg.terminal import inspection as views

    asked = aspects(only)
    found = compare(left, right)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), allow_nan=False))
    else:
        console = Console()
        console.print(views.diff(found, asked, console.width))
    if found.differs(asked):
        raise SystemExit(DIFFERENT)


def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run directory, one that holds some, or a grid.")
    ],
    rounds: Annotated[int, typer.Option(min=1, help="First rounds to train again.")] = 3,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Only so many runs.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the first rounds again: same bits here? Exit code 0 if so, 1 if not."""
    from fedzmg.experiment.verify import verify as verify_runs
    from fedzmg.terminal import inspection as views

    found = verify_runs(
        directory, rounds=rounds, runs=runs, say=lambda text: typer.echo(text, err=True)
    )
    data = [verdict.as_dict() for verdict in found]
    good = all(verdict.reproduced for verdict in found)
    if as_json:
        typer.echo(json.dumps({"reproduced": good, "runs": data}, allow_nan=False))
    else:
        console = Console()
        console.print(views.verify(data, console.width))
    if not good:
        raise SystemExit(DIFFERENT)


def list_(
    name: Annotated[str | None, typer.Argument(help="Algorithm or task to describe.")] = None,
    task: Annotated[str | None, typer.Option(help="Show costs in bytes for this task.")] = None,
    as_json: Json = False,
) -> None:
    """List algorithms and tasks, or describe one of them."""
    from fedzmg import algorithms, tasks
    from fedzmg.algorithms.options import card
    from fedzmg.terminal import cards

    size = None if task is None else tasks.info(task).describe()["model"]["bytes"]
    console = Console()
    if name in tasks.TASKS:
        described = tasks.info(name).describe()
        shown = cards.task_card(described, name, console.width)
    elif name in algorithms.ALGORITHMS:
        described = card(algorithms.ALGORITHMS[name], size)
        shown = cards.algorithm_card(described, console.width, task)
    elif name is not None:
        known = [*algorithms.ALGORITHMS, *tasks.TASKS]
        raise unknown("algorithm or task", name, known, "fedzmg list")
    else:
        described = {
            "algorithms": {n: card(e, size) for n, e in algorithms.ALGORITHMS.items()},
            "tasks": {
                n: {"summary": e.summary, "data": e.data, "missing": e.missing}
                for n, e in tasks.TASKS.items()
            },
        }
        shown = cards.tables(described, console.width)
    if as_json:
        typer.echo(json.dumps(described))
    else:
        console.print(shown)


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
    from fedzmg.report.exports import publish
    from fedzmg.results import reading
    from fedzmg.results.study_result import study_result

    material = reading.read(directories)
    outcomes = [study_result(study) for study in material.studies]
    folder = out or directories[0] / "report"
    written = publish(material, outcomes, folder, page_only=page_only)
    output.place("page", written.page)
    for what, paths in (("tables", written.tables), ("figures", written.figures)):
        if paths:
            output.place(what, f"{folder / what} ({len(paths)} files)")
    output.say(*material.notes)
    if written.cleared.removed:
        output.say(f"{len(written.cleared.removed)} files of an earlier report there are removed")
    for name in written.cleared.kept:
        output.say(f"{name} of an earlier report was changed since and is left alone")
    if open_:
        webbrowser.open(written.page.resolve().as_uri())


def keep(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run, study or grid, or some of them."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the copy goes.", show_default="results/NAME")
    ] = None,
) -> None:
    """Copy results without checkpoints, logs compressed; report, diff and verify read the copy."""
    from fedzmg.experiment.keep import keep as keep_results
    from fedzmg.results.watch import Watch

    kept = keep_results(directory, out or Path("results") / directory.resolve().name)
    sizes = (math.ceil(size / 2**20 * 10) / 10 for size in (kept.bytes, kept.bytes_before))
    after, before = (f"{size:.1f}" for size in sizes)
    output.place("kept", f"{kept.path} ({kept.files} files, {after} MiB of {before})")
    output.say(*(f"{words}; keep it again when it is" for words in Watch(directory).unfinished()))


def export(
    run_directory: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="RUN/model.safetensors")
    ] = None,
) -> None:
    """Write a run's trained model as a plain state dict in safetensors."""
    from fedzmg.experiment.run_directory import export_model

    typer.echo(str(export_model(run_directory, to)))
