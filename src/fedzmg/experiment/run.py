"""Runs: trials of equal structure that train together, each in its own run directory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError
from fedzmg.experiment import early_stopping, manifest
from fedzmg.experiment.control import checkpoint_interval, named_write_errors
from fedzmg.experiment.early_stopping import Ask, Verdict
from fedzmg.experiment.plan_directory import ANOTHER, first_difference
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.run_storage import Job, RunStorage, restore_memory, without_copies
from fedzmg.experiment.specs.run import ResolvedRun, RunSpec
from fedzmg.experiment.training import (
    build_simulation,
    recorded_chunk,
    recorded_engine,
    training_loop,
)
from fedzmg.simulation import History, resolve_device
from fedzmg.storage.formats import flat
from fedzmg.storage.lock import Hold, hold
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

CHECKPOINT_SECONDS = 10.0


def run_pack(
    task: Task,
    specs: Sequence[RunSpec | ResolvedRun],
    paths: Sequence[Path] | None = None,
    *,
    progress: Progress | None = None,
    checkpoint_seconds: float | None = None,
    stop: Ask | None = None,
    label: str | None = None,
    names: Sequence[str] | None = None,
    models: bool = True,
) -> list[History]:
    """Train runs that differ only in numbers and seeds; return one history each.

    Args:
        task: the task that all specifications name.
        specs: the runs.
        paths: a run directory each; an existing one is continued or, if complete, read.
        progress: receives progress updates.
        checkpoint_seconds: seconds between checkpoints; else ``$FEDZMG_CHECKPOINT_SECONDS``, else
            10.
        stop: called after every round; ends training or stops single runs. A stopped run has fewer
            records than rounds and a ``stopped.json``; it is not continued.
        label: name of the pack; by default the algorithm's name.
        names: names of the runs, if they are of several algorithms.
        models: whether histories need their models. If not, a finished run is complete even if its
            checkpoints were removed.

    Raises:
        InputError: for a directory that holds another run, that another process uses, or that
            cannot be written.
        TimeLimitReached: if ``stop`` says so, with everything finished stored.
        Interrupted: on Ctrl-C, likewise.
    """
    progress = progress or Silent()
    runs = [spec.resolve(task) for spec in specs]
    if names is not None:
        runs = [run.named(name) for run, name in zip(runs, names, strict=True)]
    first = runs[0].spec
    task = replace(task, protocol=first.build_protocol(task))
    rounds = task.protocol.rounds
    seconds = checkpoint_interval(CHECKPOINT_SECONDS, checkpoint_seconds)
    directories = [RunDirectory(path) for path in paths] if paths else [None] * len(runs)
    # Complete runs are only read: they need no lock and may be read-only.
    jobs = [_open_job(task, *pair, models=models) for pair in zip(runs, directories, strict=True)]
    together = _must_stay_together(first) and not all(job.complete(rounds) for job in jobs)
    to_hold = [
        directory
        for job, directory in zip(jobs, directories, strict=True)
        if directory and (together or not job.complete(rounds))
    ]
    with hold([d.path for d in to_hold], progress.say) as held:
        for i, directory in enumerate(directories):
            if directory in to_hold:
                jobs[i] = _take_job(task, runs[i], directory, progress, models=models)
        if together:
            least = _common_round(jobs, rounds)
            for i, directory in enumerate(directories):
                if directory is not None and jobs[i].done > least:
                    progress.say(f"{directory.path}: back to round {least}, where its pack is")
                    jobs[i] = _take_job(task, runs[i], directory, progress, until=least)
        histories: list[History | None] = [None] * len(jobs)
        groups: dict[tuple[int, int, EngineChoice | None], list[int]] = defaultdict(list)
        for i, job in enumerate(jobs):
            if job.complete(rounds):
                params = Tree({}) if job.position is None else job.position.checkpoint.params()
                records = tuple(job.records)
                histories[i] = History(task, job.run.trial, records, params, job.clients)
            else:
                # A crash between two checkpoints leaves runs at different rounds. Packing does not
                # change a bit, so they continue in separate packs.
                groups[job.done, job.before, job.engine].append(i)
        label = label or first.algorithm
        if not groups:
            progress.begin(label, rounds, rounds)
        for (done, _, _), members in groups.items():
            progress.begin(label, rounds, done)
            pack = [jobs[i] for i in members]
            found = _train(task, pack, progress, held, stop or (lambda _: Verdict()), seconds)
            for i, history in zip(members, found, strict=True):
                histories[i] = history
    return [h for h in histories if h is not None]


def _open_job(
    task: Task,
    run: ResolvedRun,
    directory: RunDirectory | None,
    until: int | None = None,
    *,
    models: bool = True,
) -> Job:
    """Read a run directory and check that it holds this run; reject later checkpoints."""
    if directory is None or not directory.exists:
        return Job(run, directory)
    there = directory.spec()
    if there != run.spec:
        difference = first_difference(flat(there.model_dump()), flat(run.spec.model_dump()))
        raise InputError(f"{directory.path} holds another run ({difference}): {ANOTHER}")
    facts = directory.manifest()
    manifest.refuse_other_task(directory.path, facts, task)
    records = {record.round: record for record in directory.records()}
    position = directory.position(logged=records, until=until)
    stopped = early_stopping.read(directory.path)
    last = task.protocol.rounds if stopped is None else stopped.round
    only_log = (
        not models
        and position is None
        and manifest.FINISHED in facts
        and all(round_ in records for round_ in range(1, last + 1))
    )
    done = last if only_log else 0 if position is None else position.checkpoint.round
    return Job(
        run,
        directory,
        existed=True,
        position=position,
        records=[records[round_] for round_ in range(1, done + 1)],
        engine=recorded_engine(facts),
        clients=directory.clients(until=done),
        stopped=stopped,
        only_log=only_log,
    )


def _take_job(
    task: Task,
    run: ResolvedRun,
    directory: RunDirectory,
    progress: Progress,
    until: int | None = None,
    *,
    models: bool = True,
) -> Job:
    """Open a directory that this process holds, and repair it after a crash."""
    job = _open_job(task, run, directory, until, models=models)
    if until is None and job.position is not None and job.position.rejected:
        progress.say(
            f"{job.position.rejected}: the previous checkpoint is used, from round {job.done}"
        )
    with named_write_errors(directory.path):
        directory.repair(job.position)
    return job


def _must_stay_together(spec: RunSpec) -> bool:
    """Return whether a pack must not split: on a GPU its width changes the last bits."""
    return spec.deterministic and resolve_device(spec.device).type == "cuda"


def _common_round(jobs: Sequence[Job], rounds: int) -> int:
    """Return the round from which all runs of a pack can continue together."""
    least = min(job.done for job in jobs if not job.complete(rounds))
    # A run without a checkpoint can only start again.
    return 0 if any(job.only_log and job.done > least for job in jobs) else least


def _train(
    task: Task,
    jobs: Sequence[Job],
    progress: Progress,
    held: Hold,
    stop: Ask,
    checkpoint_seconds: float,
) -> list[History]:
    """Train runs that are at the same round to their end."""
    directory = jobs[0].directory
    with named_write_errors(None if directory is None else directory.path):
        chunk = None
        if directory is not None and jobs[0].existed:
            chunk = recorded_chunk(directory.manifest(), task, len(jobs))
        simulation = build_simulation(
            task,
            [job.run.trial for job in jobs],
            jobs[0].run.spec,
            [job.directory.path for job in jobs if job.directory is not None],
            recorded=jobs[0].engine,
            chunk=chunk,
            restored=[without_copies(job.position) for job in jobs if job.position is not None],
        )
        restore_memory(jobs, simulation)
    storage = RunStorage(jobs, simulation, progress)
    training_loop(
        simulation, storage, progress, held=held, stop=stop, checkpoint_seconds=checkpoint_seconds
    )
    histories = simulation.histories(storage.records)
    return [replace(h, clients=tuple(c)) for h, c in zip(histories, storage.clients, strict=True)]
