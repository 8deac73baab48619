"""Commands that train: ``run``, ``compare`` and ``study``; ``validate``, ``schema``."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from fedzmg.cli import common
from fedzmg.cli.common import DEVICES, ENGINES, Device, Json, Texts, opt, setting
from fedzmg.errors import InputError
from fedzmg.storage.files import folder_name
from fedzmg.terminal.render import Terminal, print_text

if TYPE_CHECKING:  # a command that only prints help does without torch
    from fedzmg.cluster.packs import Packs
    from fedzmg.experiment.specs.files import GridSpec, StudySpec
    from fedzmg.experiment.specs.run import Experiment
    from fedzmg.tasks.task import Task
    from fedzmg.trackers import Naming, Tracking

Rounds = Annotated[int | None, opt("Instead of the task's own number of rounds.")]
Out = Annotated[Path | None, opt("Directory for results.", "under runs/")]
Track = Annotated[
    str | None, opt("Also log rounds to trackers, comma-separated: tensorboard, mlflow, wandb.")
]
TaskName = Annotated[str, Argument(help="A task of 'fedzmg list', or FILE.py:NAME of your own.")]
AlgorithmSettings = Annotated[
    Texts, setting("e.g. fedavg.client.lr=0.03; client.lr=0.03 changes all.", "ALGORITHM.KEY=VALUE")
]
File = Annotated[Path, Argument(help="A TOML file; experiments/ has examples.")]
Settings = Annotated[
    Texts, setting("e.g. rounds=20, seeds=[0,1], protocol.cohort=5, fedavg.client.lr=0.1.")
]
FileOut = Annotated[Path | None, opt("Directory for results.", "runs/ and the file's name")]
Minutes = Annotated[
    float | None,
    opt("End cleanly after so many minutes (exit code 75); the same command continues."),
]
On = Annotated[
    str | None,
    opt(
        "Train in worker processes: processes (one per CPU core), processes:N (both for several "
        "runs), ray (this machine), ray:N, auto (the Ray cluster here) or ray://HOST:PORT.",
        "processes for long trainings of several algorithms or many trials on a CPU, on Linux",
    ),
]


@contextlib.contextmanager
def remote_of(
    on: str | None, track: str | None, spec: "GridSpec | StudySpec | None" = None,
    task: "Task | None" = None,
) -> "Iterator[Packs | None]":  # fmt: skip
    """Connect to workers, if any are named or a plan is long; trackers then run in them."""
    from fedzmg import trackers

    needs_server = "mlflow" in trackers.named(track) and not os.environ.get("MLFLOW_TRACKING_URI")
    if on not in (None, "processes:1") and needs_server:
        remedy = "set MLFLOW_TRACKING_URI to a server, which all workers can write to"
        raise InputError(f"--track mlflow with --on {on}: {remedy}")
    if on is None and spec is not None and task is not None and not needs_server:
        from fedzmg.cluster.estimate import by_default

        on = by_default(spec, task)
    if on is None or on == "processes:1":
        yield None
        return
    from fedzmg.cluster.connect import connected
    from fedzmg.cluster.packs import Packs

    with connected(on) as cluster:
        yield Packs(cluster, track)


@contextlib.contextmanager
def progress_of(
    task: "Task", directory: Path, track: str | None, *packs: Mapping[str, int],
    naming: "Naming | None" = None,
) -> "Iterator[Tracking]":  # fmt: skip
    """Show rounds on the terminal and to trackers; report the time limit."""
    from fedzmg import trackers
    from fedzmg.experiment.training import TimeLimitReached
    from fedzmg.terminal.live import Display

    console, makers = Terminal(stderr=True), trackers.named(track)
    try:
        with (
            Display(console, task.metric.name, *packs) as display,
            trackers.Tracking(makers, directory, display, naming) as progress,
        ):
            yield progress
    except TimeLimitReached as error:
        common.say(f"{error}, run the same command again to continue")
        raise SystemExit(common.UNFINISHED) from None


@contextlib.contextmanager
def after_results(directory: Path) -> Iterator[None]:
    """Turn a failure to draw or write a figure, after all results are shown, into one line."""
    try:
        yield
    except Exception as error:
        missing = "a figure is missing, all results are stored"
        again = f"'fedzmg report {directory}' draws it again ({type(error).__name__}: {error})"
        raise InputError(f"{missing}; {again}") from None


def _train_study(
    spec: "StudySpec", task: "Task", directory: Path, track: str | None, as_json: bool,
    on: str | None, **more: Any,
) -> None:  # fmt: skip
    from fedzmg.experiment.studies.study import run_study, study_packs
    from fedzmg.report import figures
    from fedzmg.terminal import views

    sizes = {label: len(names) for label, names in study_packs(spec, task).items()}
    packs = dict.fromkeys(sizes, 1)
    with (
        remote_of(on, track, spec, task) as remote,
        progress_of(task, directory, None if remote else track, packs, sizes) as progress,
    ):
        result = run_study(spec, directory, task=task, progress=progress, remote=remote, **more)
    view, data = partial(views.study, result), result.as_dict()
    spent = f"{sum(run.seconds for run in result.study.runs):,.0f} s, all runs together"
    common.show(data, view, as_json, directory, rounds=spent, study=directory)
    with after_results(directory):
        if (chart := figures.curves(result)) is not None:
            written = figures.save(chart, directory / "curves")
            for what, path in zip(("figure", ""), () if as_json else written, strict=False):
                common.print_path(what, path)


def compare(
    task: TaskName = "digits",
    algorithms: Annotated[
        str, opt("Comma-separated, or all; the first is the reference of the tests.")
    ] = "fedzmg,fedavg,fedavg:momentum,fedadam",
    seeds: Annotated[
        int | None, opt("Paired seeds for each.", "3, or 2 for more than ten algorithms", min=1)
    ] = None,
    rounds: Rounds = None, set_: AlgorithmSettings = None,
    engine: Annotated[str, opt(ENGINES)] = "auto", device: Device = "auto",
    out: Out = None, on: On = None, track: Track = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train algorithms on paired seeds; table, figure and run directories."""
    from fedzmg.api import comparison_spec, numbered_seeds, tuning_notes, untuned
    from fedzmg.experiment.specs.plan import named_algorithms

    names, _ = named_algorithms(algorithms)
    seeds = seeds or (3 if len(names) <= 10 else 2)
    chosen, settings = task_and_settings("compare", task, set_)
    spec = comparison_spec(
        chosen, names, numbered_seeds(seeds), settings, rounds=rounds, engine=engine, device=device
    )
    directory = out or default_directory(f"compare-{chosen.name}", spec)
    if (path := directory / "study.toml").is_file():
        kept = type(spec).read(path)
        missing = [name for name in kept.algorithms if name not in spec.algorithms]
        missing += [f"seed {seed}" for seed in kept.seeds if seed not in spec.seeds]
        if missing:
            held = f"{directory} holds a comparison that also has {', '.join(missing)}"
            raise InputError(f"{held}; name these too, or choose another directory with --out")
    common.say(*chosen.notes, *tuning_notes(chosen.name, untuned(spec), (), chosen.options))
    _train_study(spec, chosen, directory, track, as_json, on, grow=True)


def run(
    task: Annotated[
        str,
        Argument(help="A task of 'fedzmg list', FILE.py:NAME of your own, or a file NAME.toml."),
    ],
    algorithm: Annotated[str | None, opt("An algorithm of 'fedzmg list'.", "fedzmg")] = None,
    seed: Annotated[int | None, opt("Fixes every random choice.", "0")] = None,
    rounds: Rounds = None,
    set_: Annotated[Texts, setting("e.g. client.lr=0.03, protocol.cohort=5.")] = None,
    engine: Annotated[str | None, opt(ENGINES, "auto")] = None,
    device: Annotated[str | None, opt(DEVICES, "auto")] = None,
    out: Out = None, on: On = None, track: Track = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Train one algorithm on one task, or the run of a spec file."""
    from fedzmg.api import tuning_notes
    from fedzmg.experiment.plugin_files import say_changed
    from fedzmg.experiment.run import run_pack
    from fedzmg.experiment.specs import files, strict
    from fedzmg.experiment.specs.run import RunSpec
    from fedzmg.plugins import load_reference

    if (Path(task) / "spec.toml").is_file():
        remedy = f"'fedzmg run {task}/spec.toml --out {task}' continues it"
        raise InputError(f"{task} is a run directory: {remedy}")
    from_file = task.endswith(".toml")
    spec = files.read(Path(task), "run") if from_file else RunSpec(task=load_reference(task))
    assert isinstance(spec, RunSpec)
    settings = strict.parse_settings(set_ or [])
    chosen = settings.pop("algorithm", algorithm) or spec.algorithm
    spec, left_out = spec.for_algorithm(str(chosen))
    if left_out:
        keys = ", ".join(left_out)
        common.say(f"{keys} of {task} left out: they were not chosen for {spec.algorithm}")
    options = {"seed": seed, "protocol.rounds": rounds, "engine": engine, "device": device}
    given = {key: value for key, value in options.items() if value is not None}
    spec = spec.with_settings({**given, **settings})
    with common.mistakes_in(task, set_) if from_file else contextlib.nullcontext():
        built = spec.build_task()
        given_rates = [f"client.{key}" for key in spec.client]
        notes = tuning_notes(spec.task, [spec.algorithm], given_rates, built.options)
        resolved = spec.resolve(built)
        spec = resolved.spec
    name = f"{spec.task}-{folder_name(spec.algorithm)}-seed-{spec.seed}"
    directory = out or default_directory(name, spec)
    common.say(*built.notes, *notes)
    with remote_of(on, track) as remote, progress_of(built, directory, track) as progress:
        say_changed([directory], directory, progress.say)
        if remote is None:
            [history] = run_pack(built, [resolved], [directory], progress=progress)
        else:
            from fedzmg.cluster.shards import train_run

            history = train_run(remote.cluster, built, resolved, directory, progress)
    last, metric, diverged = history.records[-1], built.metric.name, history.diverged
    summary = {
        "task": spec.task, "algorithm": spec.algorithm, "seed": spec.seed, "rounds": last.round,
        "metric": metric, "final": last.metric, "loss": last.loss, "diverged": diverged,
    }  # fmt: skip
    text = f"{metric} {last.metric:.4f}, loss {last.loss:.4f} after round {last.round}"
    if history.clients and (own := history.clients[-1].personal) is not None:
        text += f"; clients' own models: {metric} {own[own == own].mean():.4f} on average"
        text += f" (on their own {history.clients[-1].part} examples)"
    if diverged is not None:
        text = f"diverged in round {diverged}: {history.why_diverged()}\n{text}"
    common.show(summary, lambda _: text, as_json, directory, run=directory)


def study(
    file: File, set_: Settings = None, out: FileOut = None, max_minutes: Minutes = None,
    on: On = None, track: Track = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Compare algorithms over seeds on identical cohorts and batches; scores, tests, curves."""
    spec, task, directory = prepare("study", file, set_, out)
    _train_study(spec, task, directory, track, as_json, on, max_minutes=max_minutes, grow=True)


def validate(file: File, set_: Settings = None, on: On = None, as_json: Json = False) -> None:
    """Check a run, grid or study file and estimate its cost; nothing is written."""
    from fedzmg.experiment.estimate import estimate
    from fedzmg.experiment.specs.files import StudySpec
    from fedzmg.experiment.specs.run import RunSpec
    from fedzmg.experiment.studies.study import MissingGrid, find_rates
    from fedzmg.terminal import views

    spec = _read(file, None, set_)
    to_do: list[str] = []
    with common.mistakes_in(file, set_):
        if isinstance(spec, StudySpec):
            try:
                find_rates(spec)  # raises for a grid that does not fit
            except MissingGrid as error:
                to_do = [str(error)]
        found = estimate(spec)
    known = not (to_do or found["missing"] or isinstance(spec, RunSpec))
    with remote_of(on, None, *((spec, spec.build_task()) if known else ())) as remote:
        if remote is not None:
            from fedzmg.cluster.estimate import estimate_on

            found = estimate_on(remote.cluster, spec, found)
    common.say(*to_do)
    lines = (f"{what:<12} {text}" for what, text in views.estimate(found).items())
    print_text(json.dumps(found) if as_json else "\n".join(lines))


def schema(kind: Annotated[str, Argument(help="grid, study or run.")] = "study") -> None:
    """Print the JSON Schema of a file, for editors that complete and check TOML."""
    from fedzmg.experiment.specs.files import schema as json_schema

    print_text(json.dumps(json_schema(kind), indent=1))


def _read(file: Path, kind: str | None, settings: Texts) -> Any:
    from fedzmg.experiment.specs import files, strict

    return files.read(file, kind).with_settings(strict.parse_settings(settings or []))


def prepare(kind: str, file: Path, settings: Texts, out: Path | None) -> "tuple[Any, Task, Path]":
    """Check everything that can be checked before anything is written."""
    from fedzmg import tasks

    spec = _read(file, kind, settings)
    with common.mistakes_in(file, settings):
        if not isinstance(tasks.info(spec.task), tasks.OwnTask):
            spec.check()  # before data is read
        task = spec.build_task()
        spec.check(task)
    common.say(*task.notes)
    return spec, task, out or Path("runs") / file.stem


def task_and_settings(command: str, task: str, set_: Texts) -> "tuple[Task, dict[str, Any]]":
    """Build a named task with its preset's settings; return it with the other settings."""
    from fedzmg import tasks
    from fedzmg.experiment.specs.strict import parse_settings

    if task.endswith(".toml"):
        other = {"compare": "study", "tune": "grid"}[command]
        raise InputError(f"{task}: {command} takes a task, not a file; use 'fedzmg {other} {task}'")
    given = parse_settings(set_ or [])
    of_preset = [key for key in given if key.startswith("preset.")]
    preset = {key.removeprefix("preset."): given.pop(key) for key in of_preset}
    return tasks.get(task, preset), given


def default_directory(name: str, spec: "Experiment") -> Path:
    """Return the default directory, which the same command finds again by a hash of settings."""
    text = json.dumps(spec.model_dump(), sort_keys=True, default=str)
    return Path("runs") / f"{folder_name(name)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
