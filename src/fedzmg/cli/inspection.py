"""Commands that train nothing new: list, watch, diff, verify, report, keep and export."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.live import Live
from typer import Argument

from fedzmg.cli import common
from fedzmg.cli.common import Json, flag, opt
from fedzmg.errors import unknown
from fedzmg.terminal.render import Terminal, print_line, print_text

Directory = Annotated[
    Path, Argument(metavar="DIR", help="A run, study or grid, or a directory of some.")
]


def watch(
    directory: Directory,
    once: Annotated[bool, flag("--once", "Show the state once and end.")] = False,
    every: Annotated[float, opt("Seconds between updates.", min=0.1)] = 2.0,
    wait: Annotated[
        bool, flag("--wait", "Stay until all is trained, even if nothing runs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow a training from another terminal: states, metrics, time left; changes no file.

    It ends when all is trained, or when no process works on it any more.
    """
    from fedzmg.results.watch import Watch
    from fedzmg.terminal import inspection as view

    console, looks = Terminal(), Watch(directory).follow(every, once=once, wait=wait)
    try:
        if as_json:
            for works in looks:
                data = {"works": [work.as_dict() for work in works]}
                print_text(json.dumps(data, allow_nan=False))
        elif once:
            console.print(view.screen(next(looks), console.width))
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for works in looks:
                    live.update(view.screen(works, console.width), refresh=True)
        else:
            shown: list[str] = []
            for works in looks:
                before, shown = shown, [view.line(work) for work in works]
                for line in shown:
                    if line not in before:
                        print_line(f"{time.strftime('%H:%M:%S')} {line}")
    except KeyboardInterrupt:  # the usual way to leave
        raise SystemExit(common.INTERRUPTED) from None


def diff(
    left: Annotated[Path, Argument(metavar="A", help="A run, study or grid.")],
    right: Annotated[Path, Argument(metavar="B", help="Another one.")],
    only: Annotated[
        str | None, opt("spec, options, versions, data, curves, scores, runs, by commas.", "all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs, studies or grids: settings, versions, data, curves, scores.

    Exit code 0 without a difference, 1 with one, 2 for an error.
    """
    from fedzmg.results.diff import aspects, compare
    from fedzmg.terminal import inspection as views

    asked, found = aspects(only), compare(left, right)
    common.show(found.as_dict(), lambda width: views.diff(found, asked, width), as_json)
    if found.differs(asked):
        raise SystemExit(1)


def verify(
    directory: Directory,
    rounds: Annotated[int, opt("First rounds to train again.", min=1)] = 3,
    runs: Annotated[int | None, opt("Only so many runs.", "all", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Train the first rounds again: same bits here? Exit code 0 if so, 1 if not."""
    from fedzmg.experiment.verify import verify as verify_runs
    from fedzmg.terminal import inspection as views

    found = verify_runs(directory, rounds=rounds, runs=runs, say=partial(print_line, err=True))
    data = [verdict.as_dict() for verdict in found]
    good = all(verdict.reproduced for verdict in found)
    common.show({"reproduced": good, "runs": data}, partial(views.verify, data), as_json)
    if not good:
        raise SystemExit(1)


def list_(
    name: Annotated[str | None, Argument(help="Algorithm or task to describe.")] = None,
    task: Annotated[str | None, opt("Show costs in bytes for this task.")] = None,
    aggregators: Annotated[
        bool, flag("--aggregators", "List ways to merge updates, with their options.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List algorithms and tasks, or describe one of them."""
    from fedzmg import plugins, tasks, trackers
    from fedzmg.algorithms import ALGORITHMS
    from fedzmg.algorithms.options import card
    from fedzmg.tasks import TASKS
    from fedzmg.terminal import views

    if aggregators:
        from fedzmg.aggregators import describe

        found = describe()
        common.show(found, lambda width: views.aggregators(found, width), as_json)
        return

    def origin(table: Any, name: str) -> dict[str, Any]:
        found = table.origins.get(name)
        return {} if found is None else {"origin": found.as_dict()}

    def summary(task: Any) -> dict[str, Any]:
        return {"summary": task.summary, "data": task.data or None, "missing": task.missing}

    assert trackers.TRACKERS in plugins.REGISTRIES  # once it is imported
    name, task = (None if text is None else plugins.load_reference(text) for text in (name, task))
    size = None if task is None else tasks.info(task).describe()["model"]["bytes"]
    if name is None:
        data = {
            "algorithms": {n: card(a, size) | origin(ALGORITHMS, n) for n, a in ALGORITHMS.items()},
            "tasks": {n: summary(t) | origin(TASKS, n) for n, t in TASKS.items()},
            "installed": {table.kind: table.not_imported for table in plugins.REGISTRIES},
        }
        common.show(data, lambda width: views.tables(data, width), as_json)
    elif name in TASKS:
        data = tasks.info(name).describe() | origin(TASKS, name)
        common.show(data, lambda width: views.task_card(data, name, width), as_json)
    elif name in ALGORITHMS:
        data = card(ALGORITHMS[name], size) | origin(ALGORITHMS, name)
        common.show(data, lambda width: views.algorithm_card(data, width, task), as_json)
    else:
        raise unknown("algorithm or task", name, [*ALGORITHMS, *TASKS], "fedzmg list")


def report(
    directories: Annotated[
        list[Path],
        Argument(metavar="DIR...", help="Runs, studies, grids, descriptions of data, or some."),
    ],
    out: Annotated[Path | None, opt("Directory to write to.", "DIR/report")] = None,
    page_only: Annotated[bool, flag("--page-only", "Write no tables and figures.")] = False,
) -> None:
    """Write one self-contained HTML page about runs, grids or clients, and its tables and figures.

    Nothing is trained. Overview figures of the directories are redrawn, bit for bit.
    """
    from fedzmg.report.exports import PAGE, publish
    from fedzmg.results import reading
    from fedzmg.results.study_result import study_result

    material, folder = reading.read(directories), out or directories[0] / "report"
    outcomes = [study_result(study) for study in material.studies]
    names, removed = publish(material, outcomes, folder, page_only=page_only)
    common.print_path("page", folder / PAGE)
    for what in ("tables", "figures"):
        if count := sum(name.startswith(f"{what}/") for name in names):
            common.print_path(what, f"{folder / what} ({count} files)")
    common.say(*material.notes)
    if removed:
        common.say(f"{len(removed)} files of an earlier report there are removed")


def keep(
    directory: Directory,
    out: Annotated[Path | None, opt("Where the copy goes.", "results/NAME")] = None,
) -> None:
    """Copy results without checkpoints, logs compressed; report, diff and verify read the copy."""
    from fedzmg.experiment.keep import keep as keep_results
    from fedzmg.results.formatting import bytes_text
    from fedzmg.results.watch import Watch

    kept = keep_results(directory, out or Path("results") / directory.resolve().name)
    after, before = (bytes_text(size) for size in (kept.bytes, kept.bytes_before))
    common.print_path("kept", f"{kept.path} ({kept.files} files, {after} of {before})")
    common.say(*(f"{words}; keep it again when it is" for words in Watch(directory).unfinished()))


def restore(
    directory: Annotated[Path, Argument(help="A copy that 'fedzmg keep' made.")],
    out: Annotated[Path | None, opt("Directory for training.", "runs/NAME")] = None,
) -> None:
    """Turn a kept copy into a directory in which training continues; finished runs are read."""
    from fedzmg.experiment.keep import restore as restore_results

    to = out or Path("runs") / directory.resolve().name
    finished, left = restore_results(directory, to)
    common.print_path("restored", f"{to} ({len(finished)} finished)")
    common.say(*(f"{path} is not finished and begins again" for path in left))


def export(
    run_directory: Annotated[Path, Argument(help="A run directory.")],
    to: Annotated[Path | None, opt("File to write.", "RUN/model.safetensors")] = None,
) -> None:
    """Write a run's common model as a plain state dict in safetensors, without personal parts."""
    from fedzmg.experiment.run_directory import export_model

    print_line(export_model(run_directory, to))
