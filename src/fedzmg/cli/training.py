"""``fedzmg run`` and ``compare``: train without a settings file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedzmg.cli import output
from fedzmg.cli.options import DEVICES, ENGINES, Json, Out, Rounds, Track
from fedzmg.errors import InputError

if TYPE_CHECKING:  # a command that only prints help does without torch
    from fedzmg.experiment.specs.study import StudySpec


def compare(
    task: Annotated[str, typer.Argument(help="A task of 'fedzmg list'.")] = "digits",
    algorithms: Annotated[
        str, typer.Option(help="Comma-separated, or all; the first is the reference of the tests.")
    ] = "fedzmg,fedavg,fedavg:momentum,fedadam",
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
    from fedzmg.api import algorithm_names, comparison_spec, tuning_notes
    from fedzmg.experiment.specs.strict import parse_settings

    makers = trackers.named(track)
    if task.endswith(".toml"):
        raise InputError(f"{task}: compare takes a task, not a file; use 'fedzmg study {task}'")
    names = algorithm_names(algorithms)
    seeds = seeds or (3 if len(names) <= 10 else 2)
    given = parse_settings(set_ or [])
    preset = {k.removeprefix("preset."): v for k, v in given.items() if k.startswith("preset.")}
    settings = {key: value for key, value in given.items() if not key.startswith("preset.")}
    chosen = tasks.get(task, preset)
    spec = comparison_spec(
        chosen, names, range(seeds), settings, rounds=rounds, engine=engine, device=device
    )
    directory = out or Path("runs") / f"compare-{task}-{_digest(spec.model_dump())}"
    _refuse_to_replace(directory, spec)
    output.say(*chosen.notes, *tuning_notes(task, names, settings))
    output.Work(chosen, directory, makers, as_json).train_study(spec, grow=True)


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
    """Train one algorithm on one task, or the run of a spec file."""
    from fedzmg import trackers
    from fedzmg.api import tuning_notes
    from fedzmg.experiment.rules_hash import say_changed_runs
    from fedzmg.experiment.run import run_pack
    from fedzmg.experiment.specs import files as spec_files
    from fedzmg.experiment.specs.run import RunSpec, parse_setting
    from fedzmg.storage.files import folder_name

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
        notes = tuning_notes(spec.task, [spec.algorithm], [f"client.{k}" for k in spec.client])
        resolved = spec.resolve(chosen)
        spec = resolved.spec
    name = f"{spec.task}-{folder_name(spec.algorithm)}-seed-{spec.seed}"
    directory = out or Path("runs") / f"{name}-{_digest(spec.model_dump())}"
    output.say(*chosen.notes, *notes)
    work = output.Work(chosen, directory, makers, as_json)
    with work.shown() as progress:
        planned = {spec.algorithm: [(resolved, directory)]}
        say_changed_runs(planned, directory, progress.say)
        [history] = run_pack(chosen, [resolved], [directory], progress=progress)
    last = history.records[-1]
    summary = {
        "task": spec.task, "algorithm": spec.algorithm, "seed": spec.seed, "rounds": last.round,
        "metric": chosen.metric.name, "final": last.metric, "loss": last.loss,
        "diverged": history.diverged, "directory": str(directory),
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(summary))
        return
    if history.diverged is not None:
        work.console.print(f"diverged in round {history.diverged}: try a smaller client.lr")
    work.console.print(
        f"{chosen.metric.name} {last.metric:.4f}, loss {last.loss:.4f} after {last.round} rounds",
        highlight=False,
    )
    output.place("run", directory)


def _refuse_no_task(task: str, algorithm: str | None) -> None:
    """Refuse an argument that is not a task, and more than one algorithm."""
    from fedzmg.tasks import TASKS

    if (Path(task) / "spec.toml").is_file():
        raise InputError(
            f"{task} is a run directory: 'fedzmg run {task}/spec.toml --out {task}' continues it"
        )
    if task not in TASKS and not task.endswith(".toml") and Path(task).is_file():
        raise InputError(f"{task} is a file, not a task; settings files are called NAME.toml")
    if algorithm is not None and "," in algorithm:
        raise InputError(
            f"--algorithm {algorithm}: a run has one; use 'fedzmg compare --algorithms {algorithm}'"
        )


def _refuse_to_replace(directory: Path, spec: StudySpec) -> None:
    """Refuse a directory whose comparison has algorithms or seeds that this one lacks."""
    path = directory / "study.toml"
    if not path.is_file():
        return
    kept = type(spec).read(path)
    missing = [name for name in kept.algorithms if name not in spec.algorithms]
    missing += [f"seed {seed}" for seed in kept.seeds if seed not in spec.seeds]
    if missing:
        raise InputError(
            f"{directory} holds a comparison that also has {', '.join(missing)}; name these too, "
            "or choose another directory with --out"
        )


def _digest(values: dict[str, Any]) -> str:
    """Return a short hash of settings, by which the same command finds its directory again."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
