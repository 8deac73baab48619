"""Commands that train nothing to keep: list, watch, diff, verify, report, theory, diagnose, ..."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.live import Live
from typer import Argument

from fedzmg.cli import common
from fedzmg.cli.common import Device, Json, Texts, flag, opt, setting
from fedzmg.errors import InputError, unknown
from fedzmg.terminal.render import Terminal, print_line, print_text, render

if TYPE_CHECKING:
    from fedzmg.tasks.task import Task
    from fedzmg.tree import Tree

Directory = Annotated[Path, Argument(metavar="DIR", help="A run, study, grid, or folder of some.")]


def watch(
    directory: Directory,
    once: Annotated[bool, flag("--once", "Show the state once and end.")] = False,
    every: Annotated[float, opt("Seconds between updates.", min=0.1)] = 2.0,
    wait: Annotated[bool, flag("--wait", "Stay until all is trained, even if idle.")] = False,
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
    only: Annotated[str | None, opt("spec,options,versions,data,curves,scores,runs", "all")] = None,
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
    aggregators: Annotated[bool, flag("--aggregators", "List ways to merge updates.")] = False,
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
    directories: Annotated[list[Path], Argument(metavar="DIR...", help="Directories of results.")],
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


def theory(
    checks: Annotated[Texts, Argument(help="T1 to T13, E1 to E11.", show_default="all")] = None,
    plot: Annotated[bool, flag("--plot", "Write figures as PNG and SVG.")] = False,
    out: Annotated[Path, opt("Directory for figures.")] = Path("runs/theory"),
    html: Annotated[Path | None, opt("Write a page with tables and figures to this file.")] = None,
    quick: Annotated[bool, flag("--quick", "Fewer repetitions: faster and coarser.")] = False,
    as_json: Json = False,
) -> None:
    """Check the theory: predicted value, measured value and verdict of every claim.

    Exit code 1 if a derived value is not reproduced.
    """
    from fedzmg.report.tables.theory import overview
    from fedzmg.report.writing import check_place, staged, write
    from fedzmg.terminal import views
    from fedzmg.theory import FULL, QUICK, run

    if plot:
        check_place(out)
    if html is not None:
        common.check_output(html)
    console = Terminal(stderr=as_json)
    findings, begun = [], time.perf_counter()
    for found in run(checks or [], QUICK if quick else FULL):
        finding = found.as_dict()
        findings.append(finding)
        if as_json:
            print_line(f"{found.id}: {found.verdict}", err=True)
        else:
            console.print(views.finding(finding, console.width))
    seconds = time.perf_counter() - begun
    if as_json:  # before files: writing them may fail
        print_text(json.dumps({"findings": findings, "seconds": round(seconds, 3)}))
    if html is not None:
        from fedzmg.report.html.page import theory_page

        write(html, theory_page(findings).encode(), "choose another file")
        common.print_path("page", html, err=as_json)
    if plot:
        with staged(out, "theory") as folder:
            from fedzmg.report.figures import save, theory

            charts = [item for finding in findings for item in theory(finding).items()]
            drawn = [path for name, chart in charts for path in save(chart, folder / name)]
        for path in drawn:
            common.print_path("figure", out / path.name, err=as_json)
    if len(findings) > 1 and not as_json:
        console.print(render([overview(findings)], console.width))
    print_line(views.findings_summary(findings, seconds), err=as_json)
    if any(finding["verdict"] == "not reproduced" for finding in findings):
        raise SystemExit(1)


def diagnose(
    what: Annotated[str, Argument(metavar="TASK|RUN", help="A task or run directory.")] = "digits",
    clients: Annotated[int, opt("Largest number of clients to measure.", min=1)] = 50,
    examples: Annotated[int, opt("Largest number of examples per client.", min=1)] = 256,
    drifting: Annotated[int, opt("Clients whose local training is followed; 0: none.", min=0)] = 10,
    trial: Annotated[int, opt("Rounds with and without the projection; 0: none.", min=0)] = 6,
    along: Annotated[int, opt("Rounds of plain FedAvg to train and measure.", min=0)] = 0,
    every: Annotated[int | None, opt("Rounds between two.", "a fifth of --along", min=1)] = None,
    lr: Annotated[float | None, opt("Client learning rate.", "tuned for fedavg, or 0.05")] = None,
    seed: Annotated[int | None, opt("Seed of everything random.", "0, or the run's")] = None,
    set_: Annotated[Texts, setting("e.g. preset.centring=image, protocol.epochs=1.")] = None,
    device: Device = "auto",
    out: Annotated[Path | None, opt("Directory for files.", "runs/diagnose-NAME")] = None,
    as_json: Json = False,
) -> None:
    """Measure whether the projection will help: table by layer, figure and a verdict."""
    from fedzmg.diagnose import diagnose as measure
    from fedzmg.report import figures, writing
    from fedzmg.storage.formats import write_json
    from fedzmg.terminal import views

    task, params, round_, own_seed = _subject(what, set_ or [])
    directory = out or Path("runs") / f"diagnose-{task.name}{f'-round-{round_}' if round_ else ''}"
    files = [f"diagnosis.{suffix}" for suffix in ("json", "png", "svg")]
    common.check_output(directory, files, "diagnose")
    with Terminal(stderr=as_json).status("measuring") as status:
        found = measure(
            task, params=params, round=round_, clients=clients, examples=examples,
            drifting=drifting, lr=lr, trial=trial, along=along, every=every,
            seed=own_seed if seed is None else seed,
            device=device,  # type: ignore[arg-type]
            progress=status.update,
        )  # fmt: skip
    data = found.as_dict()
    with writing.staged(directory, "diagnose") as folder:
        write_json(folder / "diagnosis.json", data)
        figures.save(figures.diagnosis(data), folder / "diagnosis")
    figure = directory / "diagnosis.png"
    common.show(data, partial(views.diagnosis, data), as_json, directory, figure=figure)


def _subject(what: str, settings: list[str]) -> "tuple[Task, Tree | None, int, int]":
    """Load task, model, round and seed of a task's name or a run directory."""
    from fedzmg import tasks
    from fedzmg.experiment.plugin_files import refuse_unloaded
    from fedzmg.experiment.run_directory import RunDirectory
    from fedzmg.experiment.specs import run, strict
    from fedzmg.plugins import load_reference

    params, round_ = None, 0
    what = load_reference(what)
    if what in tasks.TASKS:
        for text in settings:
            if not text.startswith(("preset.", "protocol.")):
                raise InputError(f"--set {text}: expected preset.FIELD or protocol.FIELD=VALUE")
        spec = run.RunSpec(task=what).with_settings(strict.parse_settings(settings))
    elif not Path(what).is_dir():
        raise unknown("task or run directory", what, tasks.TASKS, "fedzmg list")
    elif settings:
        raise InputError(f"--set {settings[0]}: the settings of the run {what} are fixed")
    else:
        directory = RunDirectory(Path(what))
        spec = directory.spec()
        refuse_unloaded(spec.task, [], directory.path, "fedzmg.diagnose.diagnose(task, params=...)")
        checkpoint = directory.checkpoint()
        if checkpoint is None:
            raise InputError(f"{what} has no checkpoint: train the run for a round or more")
        params, round_ = checkpoint.params(), checkpoint.round
    task = spec.build_task()
    task = replace(task, protocol=spec.build_protocol(task))
    return task, params, round_, spec.seed
