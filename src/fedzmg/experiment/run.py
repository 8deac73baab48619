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
from fedzmg.experiment import manifest, stopping
from fedzmg.experiment.budget import TimeIsUp
from fedzmg.experiment.lock import Hold, hold
from fedzmg.experiment.spec import DTYPES, RunSpec
from fedzmg.experiment.stopping import Ask, Stopped, Verdict
from fedzmg.experiment.store import Position, RunDirectory
from fedzmg.simulation import (
    Checkpoint,
    ClientMetrics,
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
    clients: tuple[ClientMetrics, ...] = ()
    stopped: Stopped | None = None
    """The decision, if one was made, to train it no further from some round on."""

    @property
    def done(self) -> int:
        """Rounds that need not be repeated."""
        return 0 if self.position is None else self.position.checkpoint.round

    def complete(self, rounds: int) -> bool:
        """Whether nothing is left to train."""
        last = rounds if self.stopped is None else self.stopped.round
        return self.position is not None and self.done >= last

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
    stop: Ask | None = None,
    label: str | None = None,
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

    Raises:
        InputError: for a directory that holds another run, that another process is at work in, or
            that cannot be written.
        TimeIsUp: when ``stop`` says so, with everything finished kept.
        Interrupted: on Ctrl-C, likewise.
    """
    progress = progress or Silent()
    fitted = replace(task, protocol=specs[0].build_protocol(task))
    rounds = fitted.protocol.rounds
    seconds = checkpoint_interval() if checkpoint_seconds is None else checkpoint_seconds
    resolved = [spec.resolved(task) for spec in specs]
    directories = [None if places is None else RunDirectory(places[i]) for i in range(len(specs))]
    # Complete runs are only read, so they need no lock and may lie where nothing can be written.
    jobs = [_open(fitted, *pair) for pair in zip(resolved, directories, strict=True)]
    together = _must_stay_together(specs[0]) and not all(job.complete(rounds) for job in jobs)
    unfinished = [
        d
        for job, d in zip(jobs, directories, strict=True)
        if d and (not job.complete(rounds) or (together and job.stopped is None))
    ]
    with hold([d.path for d in unfinished], progress.say) as held:
        for i, directory in enumerate(directories):
            if directory in unfinished:
                jobs[i] = _take(fitted, resolved[i], directory, progress)
        if together:
            least = min(job.done for job in jobs if job.stopped is None)
            for i, directory in enumerate(directories):
                if directory in unfinished and jobs[i].done > least:
                    progress.say(f"{directory.path}: back to round {least}, where its pack is")
                    jobs[i] = _take(fitted, resolved[i], directory, progress, until=least)
        watch = _Watch(progress, seconds, held, stop or (lambda _: Verdict()))
        return _run_jobs(fitted, jobs, label or specs[0].algorithm, watch)


class _Watch(NamedTuple):
    """What looks after the rounds of a pack."""

    progress: Progress
    checkpoint_seconds: float
    held: Hold
    stop: Ask


def checkpoint_interval() -> float:
    """Seconds between checkpoints, unless the environment says otherwise."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return CHECKPOINT_SECONDS
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise InputError(f"{ENVIRONMENT} = {text!r}: expected a number of seconds, at least 0")


def _run_jobs(task: Task, jobs: list[_Job], label: str, watch: _Watch) -> list[History]:
    rounds, progress = task.protocol.rounds, watch.progress
    histories: list[History | None] = [None] * len(jobs)
    groups: dict[tuple[int, int, EngineName | EngineChoice], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        if job.position is not None and job.complete(rounds):
            params = job.position.checkpoint.params()
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
        found = _train(task, [jobs[i] for i in members], engine, watch)
        for i, history in zip(members, found, strict=True):
            histories[i] = history
    return [h for h in histories if h is not None]


def _must_stay_together(spec: RunSpec) -> bool:
    """Whether runs of a pack must be at the same round: on a GPU, widths decide the last bits."""
    return spec.deterministic and resolve_device(spec.device).type == "cuda"


def _take(
    task: Task,
    spec: RunSpec,
    directory: RunDirectory,
    progress: Progress,
    until: int | None = None,
) -> _Job:
    """Open a directory that this process holds, and put right what a crash left of it.

    Args:
        task: the task it was made for.
        spec: the run it should hold.
        directory: where it lies.
        progress: told of a checkpoint that cannot be used.
        until: leave out checkpoints of later rounds.
    """
    job = _open(task, spec, directory, until)
    if until is None and job.position is not None and job.position.passed_over:
        progress.say(
            f"{job.position.passed_over}: the previous checkpoint is used, from round {job.done}"
        )
    with _named_write_errors([job]):
        directory.repair(job.position)
    return job


def _open(
    task: Task, spec: RunSpec, directory: RunDirectory | None, until: int | None = None
) -> _Job:
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
    position = directory.position(logged=records, until=until)
    done = 0 if position is None else position.checkpoint.round
    kept = [records[round_] for round_ in range(1, done + 1)]
    choice = EngineChoice(facts["engine"], "as before", facts["onednn"])
    clients, stopped = directory.clients(until=done), stopping.read(directory.path)
    return _Job(spec, directory, position, kept, choice, True, clients, stopped)


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
    task: Task, jobs: list[_Job], engine: EngineName | EngineChoice, watch: _Watch
) -> list[History]:
    first, progress = jobs[0], watch.progress
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
            deterministic=first.spec.deterministic,
            chunk=_recorded_chunk(task, jobs),
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
    clients = [list(job.clients) for job in jobs]
    saved_round, saved = simulation.round, time.monotonic()
    try:
        with HeldInterrupt(progress) as interrupt:
            finished = simulation.round == simulation.rounds
            while not finished:
                chunk = simulation.chunk
                with _named_write_errors(jobs):
                    report = simulation.run_round()
                    watch.held.check()
                    if simulation.chunk != chunk:
                        progress.say(
                            f"round {report.round}: out of memory; from here on "
                            f"{simulation.chunk} clients train at once"
                        )
                        _note_chunk(jobs, report.round, simulation.chunk)
                    for i, (job, record) in enumerate(zip(jobs, report.records, strict=True)):
                        if i in simulation.resting:
                            continue
                        records[i].append(record)
                        if job.directory is not None:
                            job.directory.append(record)
                    if _looks_at_clients(first.spec, simulation):
                        for i, found in enumerate(simulation.evaluate_clients()):
                            if i not in simulation.resting:
                                clients[i].append(found)
                    verdict = watch.stop(report)
                    stopped = _stopped(jobs, report, verdict)
                    last = interrupt.asked or verdict.end or simulation.round == simulation.rounds
                    late = time.monotonic() - saved > watch.checkpoint_seconds
                    large = _to_copy(simulation, saved_round) > COPIED_BYTES
                    if last or late or large or stopped:
                        _save(jobs, simulation, saved_round, clients)
                        saved_round, saved = simulation.round, time.monotonic()
                    if stopped:
                        simulation.rest(stopped)
                        _note_pack(jobs, simulation)
                progress.advance(report)
                finished = simulation.round == simulation.rounds or simulation.at_rest
                if interrupt.asked and not finished:
                    raise KeyboardInterrupt
                if verdict.end and not finished:
                    raise TimeIsUp(simulation.round, simulation.rounds)
    except KeyboardInterrupt:
        raise Interrupted(simulation.round, simulation.rounds) from None
    histories = simulation.histories(records)
    return [replace(h, clients=tuple(c)) for h, c in zip(histories, clients, strict=True)]


def _looks_at_clients(spec: RunSpec, simulation: Simulation) -> bool:
    """Whether single clients are due after this round."""
    every = spec.client_metrics_every
    due = every > 0 and (simulation.round - 1) % every == 0
    return due or simulation.round == simulation.rounds


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


def _save(
    jobs: list[_Job],
    simulation: Simulation,
    before: int,
    clients: Sequence[Sequence[ClientMetrics]],
) -> None:
    simulation.memory.flush()
    for i, job in enumerate(jobs):
        if job.directory is not None and i not in simulation.resting:
            checkpoint, copies = simulation.checkpoint(i), _copies(simulation, i, before)
            complete = checkpoint._replace(tensors=checkpoint.tensors | copies)
            # First, so that what a checkpoint stands for is never missing beside it.
            if clients[i] and clients[i][-1].round > before:
                job.directory.save_clients(clients[i])
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


def _stopped(jobs: list[_Job], report: RoundReport, verdict: Verdict) -> list[int]:
    """Runs to train no further from now on, each with a line in its directory.

    The line is written before the checkpoint of this round: after a crash in between, the round
    is repeated and the decision kept.
    """
    found = {
        i: job.stopped
        for i, job in enumerate(jobs)
        if job.stopped is not None and job.stopped.round == report.round
    }
    for i, stopped in verdict.stopped.items():
        directory = jobs[i].directory
        # One that was stopped before goes on up to the same round.
        if jobs[i].stopped is None:
            found[i] = stopped
            if directory is not None:
                stopping.write(directory.path, stopped)
    return sorted(found)


def _note_pack(jobs: list[_Job], simulation: Simulation) -> None:
    """Record in the manifests of runs that go on who still trains beside them, and since when."""
    left = [i for i in range(len(jobs)) if i not in simulation.resting]
    names = [f"{t.algorithm.name}/seed-{t.seed}" for t in simulation.trials]
    change = {"round": simulation.round, "pack": [names[i] for i in left]}
    for i in left:
        directory = jobs[i].directory
        if directory is not None:
            facts = directory.manifest()
            before = [c for c in facts.get("pack_changes", []) if c["round"] < simulation.round]
            directory.note({**facts, "pack_changes": [*before, change]})


def _recorded_chunk(task: Task, jobs: list[_Job]) -> int | None:
    """How many clients of this pack trained at once before; None: to be measured.

    On a GPU another number would be other widths, and other widths move the last bits.
    """
    if not jobs[0].existed or jobs[0].directory is None:
        return None
    facts = jobs[0].directory.manifest()
    changes = facts.get("chunk_changes", [])
    chunk: int | None = changes[-1]["chunk"] if changes else facts.get("chunk")
    if chunk is None and facts["device"] == "cuda":
        return len(jobs) * task.protocol.cohort
    return chunk


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
