"""``fedzmg grid``, ``study``, ``validate`` and ``schema``: many runs from one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import Json, Track

File = Annotated[Path, typer.Argument(help="A TOML file; experiments/ has examples.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="e.g. rounds=20, seeds=[0,1], protocol.cohort=5, fedavg.client.lr=0.1.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Directory for results.", show_default="runs/ and the file's name"),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="End cleanly after so many minutes (exit code 75); the same command continues."
    ),
]


def grid(
    file: File,
    set_: Settings = None,
    out: Out = None,
    max_minutes: Minutes = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Choose learning rates, or any other numbers, by a grid; heat-maps and best points."""
    from fedzmg import trackers
    from fedzmg.experiment.grids.grid import run_grid
    from fedzmg.experiment.grids.score import warnings
    from fedzmg.report import figures
    from fedzmg.terminal import views

    spec, work = _prepare("grid", file, set_, out, track, as_json=as_json)
    directory, console = work.directory, work.console
    with work.shown(spec.packs(), naming=trackers.by_point(spec)) as progress:
        data = run_grid(spec, directory, task=work.task, progress=progress, max_minutes=max_minutes)
    written = figures.save(figures.heat_maps(data), directory / "heat-maps")[0]
    for name in data["algorithms"]:
        figures.save(figures.heat_map(data, name), directory / spec.folder(name) / "heat-map")
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(directory)}))
        return
    console.print(views.grid(data, console.width))
    output.say(*warnings(data))
    output.place("time", _spent(spec, directory))
    output.place("figure", written)
    output.place("grid", directory)


def _spent(spec: Any, directory: Path) -> str:
    """Return the training time of a grid, earlier calls included."""
    from fedzmg.storage.formats import read_json

    manifests = [directory / spec.folder(name) / "manifest.json" for name in spec.algorithms]
    return f"{sum(read_json(path).get('seconds', 0.0) for path in manifests):,.0f} s"


def study(
    file: File,
    set_: Settings = None,
    out: Out = None,
    max_minutes: Minutes = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Compare algorithms over seeds on identical cohorts and batches; scores, tests, curves."""
    spec, work = _prepare("study", file, set_, out, track, as_json=as_json)
    work.train_study(spec, max_minutes=max_minutes)


def validate(
    file: File,
    set_: Settings = None,
    as_json: Json = False,
) -> None:
    """Check a run, grid or study file and estimate its cost; nothing is written."""
    from fedzmg.experiment.estimate import estimate
    from fedzmg.experiment.specs.study import StudySpec
    from fedzmg.experiment.studies.study import MissingGrid, find_rates
    from fedzmg.terminal import views

    spec = _read(file, None, set_)
    to_do: list[str] = []
    with output.mistakes_in(file, set_):
        if isinstance(spec, StudySpec):
            try:
                find_rates(spec)  # raises for a grid that does not fit
            except MissingGrid as error:
                to_do = [str(error)]
            to_do += [f"{file}: {remark}" for remark in spec.remarks()]
        found = estimate(spec).as_dict()
    output.say(*to_do)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console()
    for what, text in views.estimate(found):
        output.plain(console, f"{what:<12} {text}")


def schema(
    kind: Annotated[str, typer.Argument(help="grid, study or run.")] = "study",
) -> None:
    """Print the JSON Schema of a file, for editors that complete and check TOML."""
    from fedzmg.experiment.specs.files import schema as json_schema

    typer.echo(json.dumps(json_schema(kind), indent=1))


def _read(file: Path, kind: str | None, settings: list[str] | None) -> Any:
    from fedzmg.experiment.specs import files as spec_files
    from fedzmg.experiment.specs.strict import parse_settings

    spec = spec_files.read(file, kind)
    return spec.with_settings(parse_settings(settings or []))


def _prepare(
    kind: str,
    file: Path,
    settings: list[str] | None,
    out: Path | None,
    track: str | None,
    *,
    as_json: bool,
) -> tuple[Any, output.Work]:
    """Check everything that can be checked before anything is written."""
    from fedzmg import trackers

    makers = trackers.named(track)
    spec = _read(file, kind, settings)
    with output.mistakes_in(file, settings):
        spec.check()
        task = spec.build_task()
        spec.check(task)
    remarks = spec.remarks() if kind == "study" else []
    output.say(*task.notes, *(f"{file}: {remark}" for remark in remarks))
    directory = out or Path("runs") / file.stem
    return spec, output.Work(task, directory, makers, as_json)
