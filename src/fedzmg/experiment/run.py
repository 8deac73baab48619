"""Run trials of equal structure, each in its own run directory, and go on where they stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from fedzmg.data.plan import sample_cohort
from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import manifest
from fedzmg.experiment.lock import Hold, hold
from fedzmg.experiment.spec import DTYPES, RunSpec
from fedzmg.experiment.store import Position, RunDirectory
from fedzmg.simulation import (
    Checkpoint,
    EngineName,
    History,
    Record,
    RoundReport,
    Simulation,
    resolve_device,
)
from fedzmg.tasks.task import Task
from fedzmg.tree import named_leaves, refill, row

CHECKPOINT_SECONDS = 10.0
ENVIRONMENT = "FEDZMG_CHECKPOINT_SECONDS"

COPIED_BYTES = 256 << 20
"""A checkpoint is due once it has to copy this much of what a trial's clients remember."""

COPIED = "memory|"


class Progress(Protocol):
    """Shows a user how far the work is."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """A pack starts, or goes on after ``done`` rounds."""
        ...

    def advance(self, report: RoundReport) -> None:
        """A round is finished."""
        ...

    def say(self, text: str) -> None:
        """Something the user should know."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Nothing."""

    def advance(self, report: RoundReport) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""


class _Job(NamedTuple):
    spec: RunSpec
    directory: RunDirectory | None
    position: Position | None
    records: list[Record]
    engine: EngineName | EngineChoice
    existed: bool = False

    @property
    def done(self) -> int:
        """Rounds that need not be repeated."""
        return 0 if self.position is None else self.position.checkpoint.round

    @property
    def before(self) -> int:
        """Round of the checkpoint before."""
        return 0 if self.position is None else self.position.before


def run_pack(
    task: Task,
    specs: Sequence[RunSpec],
    places: Sequence[Path] | None = None,
    *,
    progress: Progress | None = None,
    checkpoint_seconds: float | None = None,
) -> list[History]:
    """Train runs that differ only in numbers and seeds; one history each, in the given order.

    Args:
        task: the task that all specifications name.
        specs: what to run.
        places: a run directory each; one that exists already is continued or, if complete, read.
        progress: what shows the user how far the work is.
        checkpoint_seconds: how often to write checkpoints; else ``$FEDZMG_CHECKPOINT_SECONDS``,
            else 10.

    Raises:
        InputError: for a directory that holds another run, that another process is at work in, or
            that cannot be written.
        Interrupted: on Ctrl-C, with everything finished kept.
    """
    progress = progress or Silent()
    fitted = replace(task, protocol=specs[0].build_protocol(task))
    rounds = fitted.protocol.rounds
    seconds = checkpoint_interval() if checkpoint_seconds is None else checkpoint_seconds
    resolved = [spec.resolved(task) for spec in specs]
    directories = [None if places is None else RunDirectory(places[i]) for i in range(len(specs))]
    # Complete runs are only read, so they need no lock and may lie where nothing can be written.
    jobs = [_open(fitted, *pair) for pair in zip(resolved, directories, strict=True)]
    unfinished = [d for job, d in zip(jobs, directories, strict=True) if d and job.done < rounds]
    with hold([d.path for d in unfinished], progress.say) as held:
        for i, directory in enumerate(directories):
            if directory in unfinished:
                jobs[i] = _take(fitted, resolved[i], directory, progress)
        return _run_jobs(fitted, jobs, specs[0].algorithm, progress, seconds, held)


def checkpoint_interval() -> float:
    """Seconds between checkpoints, unless the environment says otherwise."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return CHECKPOINT_SECONDS
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise InputError(f"{ENVIRONMENT} = {text!r}: expected a number of seconds, at least 0")


def _run_jobs(
    task: Task, jobs: list[_Job], label: str, progress: Progress, seconds: float, held: Hold
) -> list[History]:
    rounds = task.protocol.rounds
    histories: list[History | None] = [None] * len(jobs)
    groups: dict[tuple[int, int, EngineName | EngineChoice], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        if job.position is not None and job.done >= rounds:
            params = job.position.checkpoint.params()
            histories[i] = History(task, job.spec.trial(task), tuple(job.records), params)
        else:
            # A crash between two checkpoints leaves runs of a pack at different rounds. Packing
            # does not move a bit, so they simply go on in separate packs.
            groups[job.done, job.before, job.engine].append(i)
    if not groups:
        progress.begin(label, rounds, rounds)
    for (done, _, engine), members in groups.items():
        progress.begin(label, rounds, done)
        found = _train(task, [jobs[i] for i in members], engine, progress, seconds, held)
        for i, history in zip(members, found, strict=True):
            histories[i] = history
    return [h for h in histories if h is not None]


def _take(task: Task, spec: RunSpec, directory: RunDirectory, progress: Progress) -> _Job:
    """Open a directory that this process holds, and put right what a crash left of it."""
    job = _open(task, spec, directory)
    if job.position is not None and job.position.passed_over:
        progress.say(
            f"{job.position.passed_over}: the previous checkpoint is used, from round {job.done}"
        )
    with _named_write_errors([job]):
        directory.repair(job.position)
    return job


def _open(task: Task, spec: RunSpec, directory: RunDirectory | None) -> _Job:
    """Read what a run directory holds, if it holds this run."""
    if directory is None or not directory.exists:
        return _Job(spec, directory, None, [], spec.engine)
    there = directory.spec()
    if there != spec:
        raise InputError(
            f"{directory.path} holds another run ({_difference(there, spec)}): choose another "
            "place with --out"
        )
    facts = directory.manifest()
    lacking = [name for name in ("data_sha256", "engine", "onednn") if name not in facts]
    if lacking:
        raise InputError(
            f"{directory.path}/manifest.json lacks {lacking[0]!r}: it was made by another version; "
            "choose another place with --out"
        )
    if facts["data_sha256"] != task.train.fingerprint():
        raise InputError(
            f"{directory.path} was trained on other data than {task.name!r} holds now: choose "
            "another place with --out"
        )
    if facts.get("task_sha256", task.fingerprint()) != task.fingerprint():
        raise InputError(
            f"{directory.path} was made for another model, test set or metric than {task.name!r} "
            "has now: choose another place with --out"
        )
    records = {record.round: record for record in directory.records()}
    position = directory.position(logged=records)
    done = 0 if position is None else position.checkpoint.round
    kept = [records[round_] for round_ in range(1, done + 1)]
    choice = EngineChoice(facts["engine"], "as before", facts["onednn"])
    return _Job(spec, directory, position, kept, choice, existed=True)


def _difference(kept: RunSpec, asked: RunSpec) -> str:
    """The first setting in which two specifications differ, for a message."""

    def flat(spec: RunSpec) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, value in spec.model_dump().items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            values |= {f"{key}.{name}".rstrip("."): v for name, v in inner}
        return values

    there, here = flat(kept), flat(asked)
    key = next(k for k in [*here, *there] if there.get(k) != here.get(k))
    return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"


def _train(
    task: Task,
    jobs: list[_Job],
    engine: EngineName | EngineChoice,
    progress: Progress,
    checkpoint_seconds: float,
    held: Hold,
) -> list[History]:
    first = jobs[0]
    resumed = [_without_copies(j.position.checkpoint) for j in jobs if j.position is not None]
    with _named_write_errors(jobs):
        simulation = Simulation(
            task,
            [job.spec.trial(task) for job in jobs],
            rounds=task.protocol.rounds,
            device=resolve_device(first.spec.device),
            dtype=DTYPES[first.spec.dtype],
            engine=engine,
            precision=first.spec.precision,
            restored=resumed or None,
            memory_places=None if first.directory is None else [j.directory.path for j in jobs],  # type: ignore[union-attr]
        )
        _recall(jobs, simulation)
    for job in jobs:
        if job.directory is not None:
            if job.existed:
                _warn_if_moved(job.directory, simulation, progress)
            else:
                job.directory.create(job.spec, manifest.describe(simulation))
    records = [list(job.records) for job in jobs]
    saved_round, saved = simulation.round, time.monotonic()
    try:
        with HeldInterrupt(progress) as interrupt:
            while simulation.round < simulation.rounds:
                chunk = simulation.chunk
                with _named_write_errors(jobs):
                    report = simulation.run_round()
                    held.check()
                    if simulation.chunk != chunk:
                        progress.say(
                            f"round {report.round}: out of memory; from here on "
                            f"{simulation.chunk} clients train at once"
                        )
                        _note_chunk(jobs, report.round, simulation.chunk)
                    for job, kept, record in zip(jobs, records, report.records, strict=True):
                        kept.append(record)
                        if job.directory is not None:
                            job.directory.append(record)
                    last = interrupt.asked or simulation.round == simulation.rounds
                    late = time.monotonic() - saved > checkpoint_seconds
                    if last or late or _to_copy(simulation, saved_round) > COPIED_BYTES:
                        _save(jobs, simulation, saved_round)
                        saved_round, saved = simulation.round, time.monotonic()
                progress.advance(report)
                if interrupt.asked and simulation.round < simulation.rounds:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise Interrupted(simulation.round, simulation.rounds) from None
    return simulation.histories(records)


class HeldInterrupt:
    """Holds Ctrl-C back until the round is over, so that nothing is ever kept by halves.

    A second Ctrl-C stops at once; the run then goes on from its last checkpoint.
    """

    def __init__(self, progress: Progress) -> None:
        self.asked = False
        self._progress = progress
        self._before: Any = None

    def __enter__(self) -> Self:
        # Only the main thread gets signals; elsewhere there is nothing to hold.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._progress.say("stopping after this round; press Ctrl-C again to stop at once")

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


@contextlib.contextmanager
def _named_write_errors(jobs: list[_Job]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = next((j.directory.path for j in jobs if j.directory is not None), None)
        if place is None:
            raise
        raise InputError(
            f"cannot write to {place}: {error.strerror or error}; what was kept is whole, run the "
            "same command again once there is room"
        ) from None


def _save(jobs: list[_Job], simulation: Simulation, before: int) -> None:
    simulation.memory.flush()
    for i, job in enumerate(jobs):
        if job.directory is not None:
            checkpoint, copies = simulation.checkpoint(i), _copies(simulation, i, before)
            complete = checkpoint._replace(tensors=checkpoint.tensors | copies)
            job.directory.save(complete, before)
    # Only now may what the checkpoint before the last relied on be written over. What the last one
    # relies on may be written over at any time: it has copies of it.
    simulation.memory.commit(before)


def _copies(simulation: Simulation, trial: int, since: int) -> dict[str, Tensor]:
    """What the clients of the rounds since the last checkpoint remember.

    Every client has two slots, and there are three values to tell apart: the previous checkpoint's,
    the newest one's and today's. The slots hold the first and the last, the newest checkpoint holds
    its own. Once all rounds are done nothing is written over any more.
    """
    if simulation.memory.is_empty or simulation.round == simulation.rounds:
        return {}
    protocol, seed = simulation.task.protocol, simulation.trials[trial].seed
    population = len(simulation.task.train)
    clients: set[int] = set()
    for round_ in range(since + 1, simulation.round + 1):
        cohort = sample_cohort(
            seed, round_, population, protocol.cohort, replacement=protocol.replacement
        )
        clients.update(cohort.tolist())
    named = {c: named_leaves(simulation.memory.read([(trial, c)])) for c in sorted(clients)}
    return {
        f"{COPIED}{c}|{path}": tensor[0]
        for c, each in named.items()
        for path, tensor in each.items()
    }


def _to_copy(simulation: Simulation, since: int) -> int:
    """Bytes of one trial's memory that a checkpoint would copy now, at most."""
    visits = (simulation.round - since) * simulation.task.protocol.cohort
    return min(visits, len(simulation.task.train)) * simulation.memory.kept_bytes


def _without_copies(checkpoint: Checkpoint) -> Checkpoint:
    own = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(COPIED)}
    return checkpoint._replace(tensors=own)


def _recall(jobs: list[_Job], simulation: Simulation) -> None:
    """Give clients what their checkpoint copied, beside what the checkpoint before relies on."""
    simulation.memory.commit(jobs[0].before)
    for i, job in enumerate(jobs):
        if job.position is None or simulation.memory.is_empty:
            continue
        copies: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in job.position.checkpoint.tensors.items():
            if name.startswith(COPIED):
                client, _, path = name.removeprefix(COPIED).partition("|")
                copies[int(client)][path] = tensor
        blank = row(simulation.memory.fresh, i)
        memories = {client: refill(blank, named) for client, named in copies.items()}
        simulation.memory.put(i, simulation.round, memories)


def _note_chunk(jobs: list[_Job], round_: int, chunk: int | None) -> None:
    """Record in the manifests that widths, and so the last bits, changed from a round on."""
    for job in jobs:
        if job.directory is not None:
            facts = job.directory.manifest()
            changes = [*facts.get("chunk_changes", []), {"round": round_, "chunk": chunk}]
            job.directory.note({**facts, "chunk_changes": changes})


def _warn_if_moved(directory: RunDirectory, simulation: Simulation, progress: Progress) -> None:
    """Say when a run goes on under circumstances that move its last bits."""
    then, now = directory.manifest(), manifest.describe(simulation)
    for fact in ("torch", "device", "threads", "platform"):
        if then.get(fact) != now[fact]:
            progress.say(
                f"{directory.path} began with {fact} {then.get(fact)}, goes on with {now[fact]}: "
                "the last bits may differ from an uninterrupted run"
            )
