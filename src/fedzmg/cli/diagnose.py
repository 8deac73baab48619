"""``fedzmg diagnose``: will the projection help this task?"""

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
    clients: Annotated[int, typer.Option(min=1, help="Look at this many clients.")] = 50,
    examples: Annotated[int, typer.Option(min=1, help="And at this many examples of each.")] = 256,
    drifting: Annotated[
        int, typer.Option(min=0, help="Follow the local training of so many; 0: none.")
    ] = 10,
    along: Annotated[
        int, typer.Option(min=0, help="Train so many rounds of plain FedAvg and look on the way.")
    ] = 0,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds between two looks.", show_default="a fifth of --along"),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Client rate of local training.", show_default="the task's for fedavg"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of clients, weights and batches.", show_default="0, or the run's"),
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
    from fedzmg.experiment.runs.store import write_json
    from fedzmg.report import figures
    from fedzmg.report.terminal import diagnose as diagnose_view
    from fedzmg.report.writing import check_place, refuse_foreign, staged

    task, params, round_, own_seed = _subject(what, set_ or [])
    place = out or Path("runs") / f"diagnose-{task.name}{f'-round-{round_}' if round_ else ''}"
    check_place(place, "choose another --out")
    refuse_foreign(place, FILES, WRITER)
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
    with staged(place, WRITER) as folder:
        write_json(folder / "diagnosis.json", data)
        figures.save(figures.diagnosis(data), folder / "diagnosis")
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(place)}))
        return
    console.print(diagnose_view.table(data, console.width), highlight=False)
    output.place("figure", place / "diagnosis.png")


def _subject(what: str, settings: list[str]) -> tuple[Task, Tree | None, int, int]:
    """Task, model, round and seed that a task's name or a run directory stands for."""
    from dataclasses import replace

    from fedzmg import tasks
    from fedzmg.experiment.runs.store import RunDirectory
    from fedzmg.experiment.specs.own import refuse_own_task
    from fedzmg.experiment.specs.run import parse_setting

    place = Path(what)
    if what not in tasks.TASKS:
        if not place.is_dir():
            near = str(unknown("task", what, tasks.TASKS, "fedzmg list"))
            near = near.removeprefix(f"unknown task {what!r}")
            raise InputError(f"{what!r} is neither a task nor a run directory{near}")
        if not (place / "spec.toml").is_file():
            raise InputError(
                f"{what} holds no spec.toml, so it is no run: give the directory of a run, or a "
                "task of 'fedzmg list'"
            )
        if settings:
            raise InputError(f"--set {settings[0]}: {what} is a run, whose settings are fixed")
        directory = RunDirectory(place)
        spec = directory.spec()
        refuse_own_task(spec.task, place, OWN)
        checkpoint = directory.checkpoint()
        if checkpoint is None:
            raise InputError(
                f"{what} holds no checkpoint: let the run finish a round, train it again if its "
                "checkpoints were removed, or give the original of a kept copy"
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
