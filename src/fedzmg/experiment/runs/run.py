"""Run trials of equal structure, each in its own run directory, and go on where they stopped."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError
from fedzmg.experiment.runs.job import Job, open_job, take_job
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.experiment.runs.training import PackTraining, Watch
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.stopping import Ask, Verdict
from fedzmg.experiment.work.progress import Progress, Silent
from fedzmg.simulation import EngineName, History, resolve_device
from fedzmg.storage.lock import hold
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

CHECKPOINT_SECONDS = 10.0
ENVIRONMENT = "FEDZMG_CHECKPOINT_SECONDS"


def run_pack(
    task: Task,
    specs: Sequence[RunSpec],
    places: Sequence[Path] | None = None,
    *,
    progress: Progress | None = None,
    checkpoint_seconds: float | None = None,
    stop: Ask | None = None,
    label: str | None = None,
    names: Sequence[str] | None = None,
    models: bool = True,
) -> list[History]:
    """Train runs that differ only in numbers and seeds; one history each, in the given order.

    Args:
        task: the task that all specifications name.
        specs: what to run.
        places: a run directory each; one that exists already is continued or, if complete, read.
        progress: what shows the user how far the work is.
        checkpoint_seconds: how often to write checkpoints; else ``$FEDZMG_CHECKPOINT_SECONDS``,
            else 10.
        stop: asked after every round whether to end here, and which runs to train no further. Such
            a run has fewer records than rounds, and its directory a ``stopped.json``; it is not
            taken up again.
        label: what the work is called; by default the algorithm's name.
        names: what each run is called, if they are of several algorithms.
        models: whether histories need their models. If not, a run that finished is complete even
            if its checkpoints were removed to save space.

    Raises:
        InputError: for a directory that holds another run, that another process is at work in, or
            that cannot be written.
        TimeLimitReached: when ``stop`` says so, with everything finished kept.
        Interrupted: on Ctrl-C, likewise.
    """
    progress = progress or Silent()
    fitted = replace(task, protocol=specs[0].build_protocol(task))
    rounds = fitted.protocol.rounds
    seconds = checkpoint_interval() if checkpoint_seconds is None else checkpoint_seconds
    resolved = [spec.resolved(task) for spec in specs]
    directories = [None if places is None else RunDirectory(places[i]) for i in range(len(specs))]
    # Complete runs are only read, so they need no lock and may lie where nothing can be written.
    jobs = [
        open_job(fitted, *pair, models=models) for pair in zip(resolved, directories, strict=True)
    ]
    together = _must_stay_together(specs[0]) and not all(job.complete(rounds) for job in jobs)
    to_hold = [
        directory
        for job, directory in zip(jobs, directories, strict=True)
        if directory and (together or not job.complete(rounds))
    ]
    with hold([d.path for d in to_hold], progress.say) as held:
        for i, directory in enumerate(directories):
            if directory in to_hold:
                jobs[i] = take_job(fitted, resolved[i], directory, progress, models=models)
        if together:
            least = _common_round(jobs, rounds)
            for i, directory in enumerate(directories):
                if directory is not None and jobs[i].done > least:
                    progress.say(f"{directory.path}: back to round {least}, where its pack is")
                    jobs[i] = take_job(fitted, resolved[i], directory, progress, until=least)
        watch = Watch(progress, seconds, held, stop or (lambda _: Verdict()))
        if names is not None:
            jobs = [job._replace(name=name) for job, name in zip(jobs, names, strict=True)]
        return _run_jobs(fitted, jobs, label or specs[0].algorithm, watch)


def checkpoint_interval(default: float = CHECKPOINT_SECONDS) -> float:
    """Seconds between checkpoints, unless the environment says otherwise."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise InputError(f"{ENVIRONMENT} = {text!r}: expected a number of seconds, at least 0")


def _must_stay_together(spec: RunSpec) -> bool:
    """Whether runs of a pack must be at the same round: on a GPU, widths decide the last bits."""
    return spec.deterministic and resolve_device(spec.device).type == "cuda"


def _common_round(jobs: Sequence[Job], rounds: int) -> int:
    """The round from which all runs of a pack can go on together."""
    least = min(job.done for job in jobs if not job.complete(rounds))
    # Without a checkpoint there is no way back but to the start.
    return 0 if any(job.only_log and job.done > least for job in jobs) else least


def _run_jobs(task: Task, jobs: Sequence[Job], label: str, watch: Watch) -> list[History]:
    rounds, progress = task.protocol.rounds, watch.progress
    histories: list[History | None] = [None] * len(jobs)
    groups: dict[tuple[int, int, EngineName | EngineChoice], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        if job.complete(rounds):
            params = Tree({}) if job.position is None else job.position.checkpoint.params()
            trial, records = job.spec.trial(task), tuple(job.records)
            histories[i] = History(task, trial, records, params, job.clients)
        else:
            # A crash between two checkpoints leaves runs of a pack at different rounds. Packing
            # does not move a bit, so they simply go on in separate packs.
            groups[job.done, job.before, job.engine].append(i)
    if not groups:
        progress.begin(label, rounds, rounds)
    for (done, _, engine), members in groups.items():
        progress.begin(label, rounds, done)
        found = PackTraining(task, [jobs[i] for i in members], engine, watch).run()
        for i, history in zip(members, found, strict=True):
            histories[i] = history
    return [h for h in histories if h is not None]
