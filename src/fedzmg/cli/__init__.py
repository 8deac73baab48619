"""The command line: verbs only; what they do lives in the library."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import data, experiments, inspection
from fedzmg.cli.bench import bench
from fedzmg.cli.diagnose import diagnose
from fedzmg.cli.keep import keep
from fedzmg.cli.report import report
from fedzmg.cli.theory import theory
from fedzmg.errors import InputError, Interrupted, unknown
from fedzmg.version import __version__

app = typer.Typer(
    help="Train, compare and deploy federated algorithms.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(data.app, name="data")
app.command()(bench)
app.command()(diagnose)
app.command()(keep)
app.command()(report)
app.command()(theory)
app.command()(experiments.grid)
app.command()(experiments.study)
app.command()(experiments.validate)
app.command()(experiments.schema)
app.command()(inspection.watch)
app.command()(inspection.diff)
app.command()(inspection.verify)

INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Engine = Annotated[
    str, typer.Option(help="auto (measured), sequential, vectorized, captured or compiled.")
]
Rounds = Annotated[int | None, typer.Option(help="Instead of the task's own number of rounds.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="e.g. client.lr=0.03, protocol.cohort=5."),
]
Out = Annotated[
    Path | None, typer.Option(help="Directory for results.", show_default="under runs/")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedzmg {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version


@app.command()
def compare(
    task: Annotated[str, typer.Argument(help="A task of 'fedzmg list'.")] = "digits",
    algorithms: Annotated[
        str, typer.Option(help="Comma-separated, or all; the first is the reference of the tests.")
    ] = "fedzmg,fedavg,fedadam",
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Paired seeds for each.",
            show_default="3, or 2 for more than ten algorithms",
        ),
    ] = None,
    rounds: Rounds = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="ALGORITHM.KEY=VALUE",
            help="e.g. fedavg.client.lr=0.03, or preset.centring=image for all.",
        ),
    ] = None,
    engine: Engine = "auto",
    device: Device = "auto",
    out: Out = None,
    track: experiments.Track = None,
    as_json: Json = False,
) -> None:
    """Train algorithms on paired seeds; table, figure and run directories."""
    from fedzmg import tasks, trackers
    from fedzmg.api import algorithm_names
    from fedzmg.api import compare as compare_algorithms
    from fedzmg.experiment.runs.store import write_json
    from fedzmg.report.plots import comparison
    from fedzmg.report.plots.style import save
    from fedzmg.report.terminal import tables
    from fedzmg.report.terminal.live import Display

    makers = trackers.named(track)
    names = algorithm_names(algorithms)
    seeds = seeds or (3 if len(names) <= 10 else 2)
    settings, preset = _settings_by_algorithm(set_ or [], names)
    chosen = tasks.get(task, preset)
    wanted = {"algorithms": names, "seeds": seeds, "rounds": rounds, "settings": settings,
              "engine": engine, "device": device, "preset": preset}  # fmt: skip
    place = out or Path("runs") / f"compare-{task}-{_digest(wanted)}"
    _refuse_to_replace(place, names)
    console = Console(stderr=as_json)
    _show_notes(chosen.notes)
    with (
        Display(console, chosen.metric.name) as display,
        trackers.Tracking(makers, place, display) as progress,
    ):
        result = compare_algorithms(
            chosen, names, seeds=seeds, rounds=rounds, settings=settings,
            engine=engine, device=device, out=place, progress=progress,  # type: ignore[arg-type]
        )  # fmt: skip
    data = result.as_dict()
    write_json(place / "comparison.json", data)
    written = save(comparison.figure(data), place / "curves")
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(place)}))
        return
    console.print(tables.comparison(data, console.width))
    for what, path in (("figure", written[0]), ("", written[1]), ("runs", place)):
        console.print(f"{what:<7} {path}", highlight=False, soft_wrap=True)


@app.command()
def run(
    task: Annotated[str, typer.Argument(help="A task of 'fedzmg list', or a file NAME.toml.")],
    algorithm: Annotated[
        str | None, typer.Option(help="An algorithm of 'fedzmg list'.", show_default="fedzmg")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes every random choice.", show_default="0")
    ] = None,
    rounds: Rounds = None,
    set_: Settings = None,
    engine: Annotated[
        str | None,
        typer.Option(help="auto (measured), sequential, vectorized, captured or compiled."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    out: Out = None,
    track: experiments.Track = None,
    as_json: Json = False,
) -> None:
    """Train one algorithm on one task, or what a spec file says."""
    from fedzmg import trackers
    from fedzmg.experiment.runs.run import run_pack
    from fedzmg.experiment.specs import files as spec_files
    from fedzmg.experiment.specs.run import RunSpec, parse_setting
    from fedzmg.report.terminal.live import Display

    makers = trackers.named(track)
    spec = spec_files.read(Path(task), "run") if task.endswith(".toml") else RunSpec(task=task)
    assert isinstance(spec, RunSpec)
    given: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "protocol.rounds": rounds,
                             "engine": engine, "device": device}  # fmt: skip
    settings = dict(parse_setting(text) for text in set_ or [])
    given |= {"algorithm": settings.pop("algorithm", algorithm)}
    spec, left_out = spec.for_algorithm(str(given["algorithm"] or spec.algorithm))
    if left_out:
        typer.echo(
            f"fedzmg: {', '.join(left_out)} of {task} left out: they were not chosen for "
            f"{spec.algorithm}",
            err=True,
        )
    spec = spec.with_settings({k: v for k, v in given.items() if v is not None})
    spec = spec.with_settings(settings)
    chosen = spec.build_task()
    spec = spec.resolved(chosen)
    name = f"{spec.task}-{spec.algorithm.replace(':', '-')}-seed-{spec.seed}"
    place = out or Path("runs") / f"{name}-{_digest(spec.model_dump())}"
    console = Console(stderr=as_json)
    _show_notes(chosen.notes)
    with (
        Display(console, chosen.metric.name) as display,
        trackers.Tracking(makers, place, display) as progress,
    ):
        [history] = run_pack(chosen, [spec], [place], progress=progress)
    last = history.records[-1]
    summary = {
        "task": spec.task, "algorithm": spec.algorithm, "seed": spec.seed, "rounds": last.round,
        "metric": chosen.metric.name, "final": last.metric, "loss": last.loss,
        "diverged": history.diverged, "directory": str(place),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(summary))
        return
    if history.diverged is not None:
        console.print(f"diverged in round {history.diverged}: try a smaller client.lr")
    console.print(
        f"{chosen.metric.name} {last.metric:.4f}, loss {last.loss:.4f} after {last.round} rounds",
        highlight=False,
    )
    console.print(f"run     {place}", highlight=False, soft_wrap=True)


@app.command(name="list")
def list_(
    name: Annotated[
        str | None, typer.Argument(help="An algorithm or a task: show its card.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Give a card's costs in bytes for it.")] = None,
    as_json: Json = False,
) -> None:
    """Show the algorithms and tasks there are, or the card of one of them."""
    from fedzmg import algorithms, tasks
    from fedzmg.algorithms.card import card
    from fedzmg.report.terminal import cards, tables
    from fedzmg.tasks.card import card as task_card

    size = None if task is None else task_card(tasks.entry(task))["model"]["bytes"]
    if name in tasks.TASKS:
        _show_task(name, as_json=as_json)
        return
    if name is not None:
        if name not in algorithms.ALGORITHMS:
            raise unknown("algorithm or task", name, [*algorithms.ALGORITHMS, *tasks.TASKS])
        shown = card(algorithms.ALGORITHMS[name], size)
        if as_json:
            typer.echo(json.dumps(shown))
        else:
            console = Console()
            console.print(cards.card(shown, console.width, task), highlight=False)
        return
    if as_json:
        found = {n: card(e, size) for n, e in algorithms.ALGORITHMS.items()}
        presets = {
            n: {"summary": e.summary, "data": e.data, "missing": e.missing}
            for n, e in tasks.TASKS.items()
        }
        typer.echo(json.dumps({"algorithms": found, "tasks": presets}))
        return
    console = Console()
    rows = [
        (n, e.summary + (" (inferred)" if e.inferred else ""), e.source)
        for n, e in algorithms.ALGORITHMS.items()
    ]
    heads = ["name", "what it is", "source"]
    console.print(tables.listing(heads, rows, console.width, title="Algorithms"))
    rest = [(n, e.summary, e.missing) for n, e in tasks.TASKS.items()]
    heads = ["name", "what it is", "data to get first"]
    console.print(tables.listing(heads, rest, console.width, title="Tasks"))


def _show_task(name: str, *, as_json: bool) -> None:
    """A task's card: data, clients, model, protocol and the fields of its preset."""
    from fedzmg import tasks
    from fedzmg.report.numbers import bytes_text
    from fedzmg.report.terminal import tables
    from fedzmg.tasks.card import card

    shown = card(tasks.entry(name))
    if as_json:
        typer.echo(json.dumps(shown))
        return
    model = shown["model"]
    place = f"not here yet: {shown['missing']}" if shown["missing"] else "here"
    facts = {
        "data": "ships with fedzmg" if shown["data"] is None else f"{shown['data']} ({place})",
        "clients": f"{shown['clients']:,}",
        "model": f"{model['parameters']:,} parameters, {bytes_text(model['bytes'])}",
        "protocol": ", ".join(f"{k} {v}" for k, v in shown["protocol"].items()),
    }
    console = Console()
    console.print(f"{name}: {shown['summary']}\n", style="bold", highlight=False, markup=False)
    console.print(shown["about"] + "\n", highlight=False, markup=False)
    for what, text in facts.items():
        console.print(f"{what:<9} {text}", highlight=False, markup=False)
    if shown["fields"]:
        rows = [(f["key"], str(f["default"]), f["range"], f["doc"]) for f in shown["fields"]]
        heads = ["key", "default", "allowed", "what it is"]
        console.print()
        console.print(tables.listing(heads, rows, console.width, title="Choices (--set KEY=VALUE)"))


@app.command()
def export(
    run_directory: Annotated[Path, typer.Argument(help="A run directory.")],
    to: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="RUN/model.safetensors")
    ] = None,
) -> None:
    """Write a run's trained model as a plain state dict in safetensors."""
    from fedzmg.experiment.runs.export import export_model

    path = export_model(run_directory, to)
    typer.echo(str(path))


def _show_notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        typer.echo(f"fedzmg: {note}", err=True)


def _settings_by_algorithm(
    texts: list[str], names: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """``fedavg.client.lr=0.1`` for one algorithm, ``client.lr=0.1`` for all of them.

    ``preset.centring=image`` is apart: it changes the task that all of them train on.
    """
    from fedzmg.experiment.specs.run import parse_setting

    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    preset: dict[str, Any] = {}
    for text in texts:
        key, value = parse_setting(text)
        owner, _, rest = key.partition(".")
        if owner == "preset" and rest:
            preset[rest] = value
            continue
        for name in [owner] if owner in settings and rest else names:
            settings[name][rest if owner in settings and rest else key] = value
    return settings, preset


def _refuse_to_replace(place: Path, names: list[str]) -> None:
    """A comparison may grow in its place; one that lacks an algorithm would replace it."""
    path = place / "comparison.json"
    if not path.is_file():
        return
    try:
        there = [row["algorithm"] for row in json.loads(path.read_text())["algorithms"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore or remove it") from None
    missing = [name for name in there if name not in names]
    if missing:
        raise InputError(
            f"{place} holds a comparison that also has {', '.join(missing)}: name these too, or "
            "choose another place with --out"
        )


def _digest(values: dict[str, Any]) -> str:
    """A short name for settings, so that the same command finds its own directory again.

    What was added to settings later counts only where it is used, so that older directories are
    found again.
    """
    usual = {"preset": {}, "precision": "float32", "deterministic": False}
    named = {k: v for k, v in values.items() if k not in usual or v != usual[k]}
    text = json.dumps(named, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def main() -> None:
    """Entry point: one line and exit code 2 for bad input, 130 for Ctrl-C."""
    try:
        if app(standalone_mode=False) == INTERRUPTED:
            raise KeyboardInterrupt
    except InputError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _interrupted("before anything was done; run the same command again")
    except Interrupted as error:
        _interrupted(
            f"after round {error.done} of {error.rounds}; nothing is lost, run the same command "
            "again to go on"
        )
    except Exception as error:
        # Usage errors, of click or of the copy that newer versions of typer carry along.
        if not hasattr(error, "format_message"):
            raise
        _fail(_said_once(error.format_message()))


def _said_once(message: str) -> str:
    """Without the suggestion that click and typer both append."""
    return re.sub(r"(Did you mean [^?]*\?)(\s+\1)+", r"\1", message)


def _interrupted(message: str) -> None:
    typer.echo(f"\nfedzmg: interrupted {message}", err=True)
    sys.exit(INTERRUPTED)


def _fail(message: str) -> None:
    if message.strip():  # empty after the help that a bare command shows
        typer.echo(f"fedzmg: error: {' '.join(message.split())}", err=True)
    sys.exit(2)
