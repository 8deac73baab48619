"""Commands that measure: ``fedzmg theory`` and ``diagnose``."""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from fedzmg.cli import common
from fedzmg.cli.common import Device, Json, Texts, flag, opt, setting
from fedzmg.errors import InputError, unknown
from fedzmg.terminal.render import Terminal, print_line, print_text, render

if TYPE_CHECKING:
    from fedzmg.tasks.task import Task
    from fedzmg.tree import Tree


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
    what: Annotated[
        str, Argument(metavar="TASK|RUN", help="A task of 'fedzmg list', or a run directory.")
    ] = "digits",
    clients: Annotated[int, opt("Largest number of clients to measure.", min=1)] = 50,
    examples: Annotated[int, opt("Largest number of examples per client.", min=1)] = 256,
    drifting: Annotated[int, opt("Clients whose local training is followed; 0: none.", min=0)] = 10,
    trial: Annotated[int, opt("Rounds with and without the projection; 0: none.", min=0)] = 6,
    along: Annotated[int, opt("Rounds of plain FedAvg to train and measure.", min=0)] = 0,
    every: Annotated[
        int | None, opt("Rounds per measurement.", "a fifth of --along", min=1)
    ] = None,
    lr: Annotated[
        float | None, opt("Client learning rate.", "the task's tuned one for fedavg, or 0.05")
    ] = None,
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
