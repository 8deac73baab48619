"""``fedzmg diagnose``: measure whether the projection helps a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import DEVICES, Json
from fedzmg.errors import InputError, unknown

if TYPE_CHECKING:
    from fedzmg.tasks.task import Task
    from fedzmg.tree import Tree

WRITER = "diagnose"
OWN = "fedzmg.diagnose.diagnose(task, params=...)"
FILES = ("diagnosis.json", "diagnosis.png", "diagnosis.svg")


def diagnose(
    what: Annotated[
        str, typer.Argument(metavar="TASK|RUN", help="A task of 'fedzmg list', or a run directory.")
    ] = "digits",
    clients: Annotated[int, typer.Option(min=1, help="Largest number of clients to measure.")] = 50,
    examples: Annotated[
        int, typer.Option(min=1, help="Largest number of examples per client.")
    ] = 256,
    drifting: Annotated[
        int, typer.Option(min=0, help="Clients whose local training is followed; 0: none.")
    ] = 10,
    along: Annotated[
        int, typer.Option(min=0, help="Rounds of plain FedAvg to train and measure.")
    ] = 0,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds between measurements.", show_default="a fifth of --along"),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Client learning rate of local training.", show_default="the task's for fedavg"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of clients, weights and batches.", show_default="0, or the run's"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="e.g. preset.centring=image, protocol.epochs=1."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Directory for files.", show_default="runs/diagnose-NAME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure whether the projection will help: table by layer, figure and a verdict."""
    from fedzmg.diagnose import diagnose as measure
    from fedzmg.report import figures
    from fedzmg.report.terminal import views
    from fedzmg.report.writing import check_place, refuse_foreign, staged
    from fedzmg.storage.formats import write_json

    task, params, round_, own_seed = _subject(what, set_ or [])
    directory = out or Path("runs") / f"diagnose-{task.name}{f'-round-{round_}' if round_ else ''}"
    check_place(directory, "choose another --out")
    refuse_foreign(directory, FILES, WRITER)
    console = Console(stderr=as_json)
    with console.status("measuring") as status:
        found = measure(
            task, params=params, round=round_, clients=clients, examples=examples,
            drifting=drifting, lr=lr, along=along, every=every,
            seed=own_seed if seed is None else seed,
            device=device,  # type: ignore[arg-type]
            progress=status.update,
        )  # fmt: skip
    data = found.as_dict()
    with staged(directory, WRITER) as folder:
        write_json(folder / "diagnosis.json", data)
        figures.save(figures.diagnosis(data), folder / "diagnosis")
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(directory)}))
        return
    console.print(views.diagnosis(data, console.width))
    output.place("figure", directory / "diagnosis.png")


def _subject(what: str, settings: list[str]) -> tuple[Task, Tree | None, int, int]:
    """Load task, model, round and seed of a task's name or a run directory."""
    from dataclasses import replace

    from fedzmg import tasks
    from fedzmg.experiment.run_directory import RunDirectory
    from fedzmg.experiment.specs.files import refuse_own_task
    from fedzmg.experiment.specs.run import parse_setting

    path = Path(what)
    if what not in tasks.TASKS:
        if not path.is_dir():
            near = str(unknown("task", what, tasks.TASKS, "fedzmg list"))
            near = near.removeprefix(f"unknown task {what!r}")
            raise InputError(f"{what!r} is neither a task nor a run directory{near}")
        if not (path / "spec.toml").is_file():
            raise InputError(
                f"{what} has no spec.toml: pass the directory of a run, or a task of 'fedzmg list'"
            )
        if settings:
            raise InputError(f"--set {settings[0]}: the settings of the run {what} are fixed")
        directory = RunDirectory(path)
        spec = directory.spec()
        refuse_own_task(spec.task, path, OWN)
        checkpoint = directory.checkpoint()
        if checkpoint is None:
            raise InputError(
                f"{what} has no checkpoint: let the run finish a round, or train it again"
            )
        task = spec.build_task()
        task = replace(task, protocol=spec.build_protocol(task))
        return task, checkpoint.params(), checkpoint.round, spec.seed
    changed: dict[str, dict[str, Any]] = {"preset": {}, "protocol": {}}
    for text in settings:
        key, value = parse_setting(text)
        table, _, name = key.partition(".")
        if table not in changed or not name:
            raise InputError(f"--set {text}: expected preset.FIELD=VALUE or protocol.FIELD=VALUE")
        changed[table][name] = value
    task = tasks.get(what, changed["preset"])
    return replace(task, protocol=task.protocol.with_options(changed["protocol"])), None, 0, 0
