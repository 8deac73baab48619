"""Run trials of equal structure, each in its own run directory, and go on where they stopped."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from fedzmg.engine.choose import EngineChoice
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import manifest
from fedzmg.experiment.spec import DTYPES, RunSpec
from fedzmg.experiment.store import RunDirectory
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

CHECKPOINT_SECONDS = 10.0


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
    checkpoint: Checkpoint | None
    records: list[Record]
    engine: EngineName | EngineChoice
    existed: bool = False


def run_pack(
    task: Task,
    specs: Sequence[RunSpec],
    places: Sequence[Path] | None = None,
    *,
    progress: Progress | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[History]:
    """Train runs that differ only in numbers and seeds; one history each, in the given order.

    Args:
        task: the task that all specifications name.
        specs: what to run.
        places: a run directory each; one that exists already is continued or, if complete, read.
        progress: what shows the user how far the work is.
        checkpoint_seconds: how often to write checkpoints.

    Raises:
        InputError: for a directory that holds another run or cannot be written.
        Interrupted: on Ctrl-C, with everything finished kept.
    """
    progress = progress or Silent()
    fitted = replace(task, protocol=specs[0].build_protocol(task))
    rounds = fitted.protocol.rounds
    jobs = [
        _open(fitted, spec.resolved(task), None if places is None else RunDirectory(places[i]))
        for i, spec in enumerate(specs)
    ]
    histories: list[History | None] = [None] * len(jobs)
    groups: dict[tuple[int, EngineName | EngineChoice], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        done = 0 if job.checkpoint is None else job.checkpoint.round
        if job.checkpoint is not None and done >= rounds:
            trial = job.spec.trial(fitted)
            histories[i] = History(fitted, trial, tuple(job.records), job.checkpoint.params())
        else:
            # A crash between two checkpoints leaves runs of a pack at different rounds. Packing
            # does not move a bit, so they simply go on in separate packs.
            groups[done, job.engine].append(i)
    label = specs[0].algorithm
    if not groups:
        progress.begin(label, rounds, rounds)
    for (done, engine), members in groups.items():
        progress.begin(label, rounds, done)
        pack = [jobs[i] for i in members]
        found = _train(fitted, pack, engine, progress, checkpoint_seconds)
        for i, history in zip(members, found, strict=True):
            histories[i] = history
    return [h for h in histories if h is not None]


def _open(task: Task, spec: RunSpec, directory: RunDirectory | None) -> _Job:
    """Read what a run directory holds, if it holds this run."""
    if directory is None or not directory.exists:
        return _Job(spec, directory, None, [], spec.engine)
    kept = directory.spec()
    if kept != spec:
        raise InputError(
            f"{directory.path} holds another run ({_difference(kept, spec)}): choose another place "
            "with --out"
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
    checkpoint = directory.checkpoint()
    done = 0 if checkpoint is None else checkpoint.round
    records = directory.records(until=done)
    if [r.round for r in records] != list(range(1, done + 1)):
        raise InputError(
            f"{directory.path}/metrics.jsonl lacks rounds that the checkpoint has: restore it, or "
            "choose another place with --out"
        )
    choice = EngineChoice(facts["engine"], "as before", facts["onednn"])
    return _Job(spec, directory, checkpoint, records, choice, existed=True)


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
) -> list[History]:
    first = jobs[0]
    resumed = [job.checkpoint for job in jobs if job.checkpoint is not None]
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
    for job in jobs:
        if job.directory is not None:
            if job.existed:
                _warn_if_moved(job.directory, simulation, progress)
            else:
                job.directory.create(job.spec, manifest.describe(simulation))
    records = [list(job.records) for job in jobs]
    saved = time.monotonic()
    try:
        with _HeldInterrupt(progress) as interrupt:
            while simulation.round < simulation.rounds:
                chunk = simulation.chunk
                report = simulation.run_round()
                if simulation.chunk != chunk:
                    progress.say(
                        f"round {report.round}: out of memory; from here on "
                        f"{simulation.chunk} clients train at once"
                    )
                    _note_chunk(jobs, report.round, simulation.chunk)
                with _named_write_errors(jobs):
                    for job, kept, record in zip(jobs, records, report.records, strict=True):
                        kept.append(record)
                        if job.directory is not None:
                            job.directory.append(record)
                    last = interrupt.asked or simulation.round == simulation.rounds
                    if last or time.monotonic() - saved > checkpoint_seconds:
                        _save(jobs, simulation)
                        saved = time.monotonic()
                progress.advance(report)
                if interrupt.asked and simulation.round < simulation.rounds:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise Interrupted(simulation.round, simulation.rounds) from None
    return simulation.histories(records)


class _HeldInterrupt:
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
        place = next((str(j.directory.path) for j in jobs if j.directory is not None), "")
        raise InputError(
            f"cannot write to {place}: {error.strerror}; what was kept is whole, run the same "
            "command again once there is room"
        ) from None


def _save(jobs: list[_Job], simulation: Simulation) -> None:
    simulation.memory.flush()
    for i, job in enumerate(jobs):
        if job.directory is not None:
            job.directory.save(simulation.checkpoint(i))
    # Only now may the slots that the checkpoints before relied on be written again.
    simulation.memory.commit(simulation.round)


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
