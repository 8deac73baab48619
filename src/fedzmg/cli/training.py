"""``fedzmg run`` and ``compare``: train without a file of settings."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedzmg.cli import output
from fedzmg.cli.options import DEVICES, ENGINES, Json, Out, Rounds, Track
from fedzmg.errors import InputError


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
    engine: Annotated[str, typer.Option(help=ENGINES)] = "auto",
    device: Annotated[str, typer.Option(help=DEVICES)] = "auto",
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train algorithms on paired seeds; table, figure and run directories."""
    from fedzmg import tasks, trackers
    from fedzmg.api import algorithm_names
    from fedzmg.api import compare as compare_algorithms
    from fedzmg.report import figures
    from fedzmg.report.terminal import views
    from fedzmg.report.terminal.live import Display
    from fedzmg.results.reading import read
    from fedzmg.results.study_result import study_result
    from fedzmg.tasks.tuned import tuning_notes

    makers = trackers.named(track)
    if task.endswith(".toml"):
        raise InputError(f"{task}: compare takes a task, not a file; use 'fedzmg study {task}'")
    names = algorithm_names(algorithms)
    seeds = seeds or (3 if len(names) <= 10 else 2)
    settings, preset = _settings_by_algorithm(set_ or [], names)
    chosen = tasks.get(task, preset)
    wanted = {"algorithms": names, "seeds": seeds, "rounds": rounds, "settings": settings,
              "engine": engine, "device": device, "preset": preset}  # fmt: skip
    place = out or Path("runs") / f"compare-{task}-{_digest(wanted)}"
    _refuse_to_replace(place, names)
    console = Console(stderr=as_json)
    output.say(*chosen.notes, *tuning_notes(task, names, settings))
    with (
        Display(console, chosen.metric.name) as display,
        trackers.Tracking(makers, place, display) as progress,
    ):
        result = compare_algorithms(
            chosen, names, seeds=seeds, rounds=rounds, settings=settings,
            engine=engine, device=device, out=place, progress=progress,  # type: ignore[arg-type]
        )  # fmt: skip
    data = result.as_dict()
    written = figures.save(figures.comparison(data), place / "curves")
    if as_json:
        typer.echo(json.dumps({**data, "directory": str(place)}))
        return
    for study in read([place]).studies:
        console.print(views.study(study_result(study), console.width))
    for what, path in (("figure", written[0]), ("", written[1]), ("runs", place)):
        output.place(what, path)


def run(
    task: Annotated[str, typer.Argument(help="A task of 'fedzmg list', or a file NAME.toml.")],
    algorithm: Annotated[
        str | None, typer.Option(help="An algorithm of 'fedzmg list'.", show_default="fedzmg")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Fixes every random choice.", show_default="0")
    ] = None,
    rounds: Rounds = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="e.g. client.lr=0.03, protocol.cohort=5."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help=ENGINES, show_default="auto")] = None,
    device: Annotated[str | None, typer.Option(help=DEVICES, show_default="auto")] = None,
    out: Out = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train one algorithm on one task, or what a spec file says."""
    from fedzmg import trackers
    from fedzmg.experiment.rules_hash import PlannedRun, say_changed_runs
    from fedzmg.experiment.run import run_pack
    from fedzmg.experiment.specs import files as spec_files
    from fedzmg.experiment.specs.run import RunSpec, parse_setting
    from fedzmg.report.terminal.live import Display
    from fedzmg.storage.files import folder_name
    from fedzmg.tasks.tuned import tuning_notes

    makers = trackers.named(track)
    from_file = task.endswith(".toml")
    _refuse_no_task(task, algorithm)
    spec = spec_files.read(Path(task), "run") if from_file else RunSpec(task=task)
    assert isinstance(spec, RunSpec)
    given: dict[str, Any] = {"algorithm": algorithm, "seed": seed, "protocol.rounds": rounds,
                             "engine": engine, "device": device}  # fmt: skip
    settings = dict(parse_setting(text) for text in set_ or [])
    given |= {"algorithm": settings.pop("algorithm", algorithm)}
    spec, left_out = spec.for_algorithm(str(given["algorithm"] or spec.algorithm))
    if left_out:
        output.say(
            f"{', '.join(left_out)} of {task} left out: they were not chosen for {spec.algorithm}"
        )
    spec = spec.with_settings({k: v for k, v in given.items() if v is not None})
    spec = spec.with_settings(settings)
    with output.mistakes_in(task, set_) if from_file else contextlib.nullcontext():
        chosen = spec.build_task()
        notes = tuning_notes(
            spec.task, [spec.algorithm], {spec.algorithm: {f"client.{k}": 0 for k in spec.client}}
        )
        resolved = spec.resolve(chosen)
        spec = resolved.spec
    name = f"{spec.task}-{folder_name(spec.algorithm)}-seed-{spec.seed}"
    place = out or Path("runs") / f"{name}-{_digest(spec.model_dump())}"
    console = Console(stderr=as_json)
    output.say(*chosen.notes, *notes)
    with (
        Display(console, chosen.metric.name) as display,
        trackers.Tracking(makers, place, display) as progress,
    ):
        planned = PlannedRun(spec.algorithm, resolved, place)
        say_changed_runs(chosen, [planned], place, progress.say)
        [history] = run_pack(chosen, [resolved], [place], progress=progress)
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
    output.place("run", place)


def _refuse_no_task(task: str, algorithm: str | None) -> None:
    """Say what to do instead with what is no task, and with more than one algorithm."""
    from fedzmg.tasks import TASKS

    if (Path(task) / "spec.toml").is_file():
        raise InputError(
            f"{task} is a run directory: 'fedzmg run {task}/spec.toml --out {task}' goes on with it"
        )
    if task not in TASKS and not task.endswith(".toml") and Path(task).is_file():
        raise InputError(f"{task} is a file, and no task: name a file of settings NAME.toml")
    if algorithm is not None and "," in algorithm:
        raise InputError(
            f"--algorithm {algorithm}: a run has one; use 'fedzmg compare --algorithms {algorithm}'"
        )


def _settings_by_algorithm(
    texts: list[str], names: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """``fedavg.client.lr=0.1`` for one algorithm, ``client.lr=0.1`` for all of them.

    ``preset.centring=image`` is apart: it changes the task that all of them train on.
    """
    from fedzmg.algorithms import ALGORITHMS
    from fedzmg.experiment.specs.run import parse_setting

    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    preset: dict[str, Any] = {}
    for text in texts:
        key, value = parse_setting(text)
        owner, _, rest = key.partition(".")
        if owner == "preset" and rest:
            preset[rest] = value
            continue
        if rest and owner in ALGORITHMS and owner not in settings:
            raise InputError(
                f"--set {text}: {owner} is not among the algorithms compared "
                f"({', '.join(names)}); name it in --algorithms or leave the setting out"
            )
        for name in [owner] if owner in settings and rest else names:
            settings[name][rest if owner in settings and rest else key] = value
    return settings, preset


def _refuse_to_replace(place: Path, names: list[str]) -> None:
    """A comparison may grow in its place; one that lacks an algorithm would replace it."""
    from fedzmg.api import compared_in

    missing = [name for name in compared_in(place) if name not in names]
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
