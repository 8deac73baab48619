"""The training loop, and its ends: early stopping, Ctrl-C, a time limit, a full disk."""

import abc
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment import run_directory
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.files import StudySpec
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.simulation import Checkpoint, EngineName, RoundReport, Simulation, Trial, resolve_device
from fedzmg.simulation.shards import LocalShards, Shards
from fedzmg.storage import lock
from fedzmg.storage.files import naming_errors, remove_leftovers, write_atomic
from fedzmg.storage.formats import flat, write_json
from fedzmg.storage.reading import check_folder
from fedzmg.tasks.task import Task

CHECKPOINT_SHARE = 0.05  # largest share of the time that writing checkpoints may take
Why: TypeAlias = Literal["diverged", "halving"]
STOPPED = "stopped.json"
FORMAT = 1  # format of ``stopped.json``, ``grid.json``, ``scores.json`` and ``study.json``
ANOTHER = "choose another directory with --out"
REMAKE = "remove it to make it again"


class TimeLimitReached(Exception):
    """The time limit is reached; everything finished so far was kept."""

    def __init__(self, done: int, rounds: int) -> None:
        super().__init__(f"time is up after round {done} of {rounds}; nothing is lost")
        self.done, self.rounds = done, rounds


def deadline(minutes: float | None) -> float:
    """Return the end of a time limit on the monotonic clock; None is no limit."""
    if minutes is not None and not minutes > 0:
        raise InputError(f"max-minutes = {minutes!r}: expected a number above 0")
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


@contextlib.contextmanager
def on_interrupt(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C by ``handler``; only the main thread receives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def deferred_interrupt(progress: Progress) -> Iterator[threading.Event]:
    """Defer Ctrl-C to the end of a round; a second Ctrl-C stops at once."""
    requested = threading.Event()

    def ask(*_: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        progress.say("stopping after this round; press Ctrl-C again to stop at once")

    with on_interrupt(ask):
        yield requested


def named_write_errors(path: Path | None) -> contextlib.AbstractContextManager[None]:
    """Turn a system error into one line with the results directory; None turns nothing."""
    remedy = "results so far are complete, run the same command again when there is room"
    return contextlib.nullcontext() if path is None else naming_errors(f"to {path}", remedy)


@contextlib.contextmanager
def claimed(
    out: Path, spec: Plan, name: str, say: Callable[[str], None], *, grow: bool = False
) -> Iterator[tuple[lock.Hold, bool]]:
    """Lock a directory and write its plan ``name``, or check that it holds the same plan.

    With ``grow``, a study that extends the one there replaces it. Yield the lock, and True for a
    study that is only a part of the one there.
    """
    check_folder(out)
    with lock.hold([out], say) as held:
        path, part = out / name, False
        remove_leftovers(out, name)
        kept = type(spec).read(path) if path.is_file() else None
        if kept is None and any(p.name not in (lock.NAME, lock.GUARD) for p in out.iterdir()):
            raise InputError(f"{out} is not empty and holds no {name}: {ANOTHER}")
        difference = ""
        if kept is not None and kept != spec:
            values = (plan.model_dump(exclude_none=True) for plan in (kept, spec))
            # An algorithm without settings of its own is an empty table, but it counts.
            full = ({k: v for k, v in one.items() if v != {}} for one in values)
            difference = first_difference(*(flat(one, keep_empty=True) for one in full))
        elif kept is not None and kept.orders() != spec.orders():
            difference = first_difference(kept.orders(), spec.orders())
        if difference and grow and isinstance(spec, StudySpec) and isinstance(kept, StudySpec):
            part = kept != spec and kept.extends(spec)
            difference = "" if part or spec.extends(kept) else difference
            kept = kept if part else None
        if difference:
            raise InputError(f"{out} holds another {path.stem} ({difference}): {ANOTHER}")
        if path.is_file():
            for folder in (out, *(out / spec.folder(each) for each in spec.algorithms)):
                remove_leftovers(folder)
        if kept is None:
            with named_write_errors(out):
                write_atomic(path, spec.to_toml().encode())
        yield held, part


def first_difference(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Describe the first setting, by dotted name, in which two specifications differ."""
    key = next(k for k in [*here, *there] if there.get(k) != here.get(k))
    return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"


def checkpoint_interval(default: float, given: float | None = None) -> float:
    """Return the seconds between checkpoints: those given, the environment's or the default."""
    text = os.environ.get("FEDZMG_CHECKPOINT_SECONDS")
    if given is not None or not text:
        return default if given is None else given
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise InputError(f"FEDZMG_CHECKPOINT_SECONDS = {text!r}: expected a number, at least 0")


class Stopped(NamedTuple):
    """The decision to train a trial no further; it keeps its model and leaves its pack."""

    round: int  # the last round that it trained; 0 if it never began
    why: Why
    words: str  # the reason in words
    score: float | None = None  # score of its point then, if it was compared with others

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Stopped":
        """Parse a decision; a wrong value raises ``KeyError``, ``TypeError``, ``ValueError``."""
        score = None if line.get("score") is None else float(line["score"])
        return cls(int(line["round"]), line["why"], str(line["words"]), score)


Ask: TypeAlias = Callable[[RoundReport], Mapping[int, Stopped]]
"""Stopping rule, called after every round; trials by their position in the simulation."""


def newly_diverged(report: RoundReport) -> dict[int, Stopped]:
    """Return trials that diverged and would continue to train."""
    if report.round == report.simulation.rounds:
        return {}
    return {
        i: Stopped(report.round, "diverged", f"diverged in round {report.round}")
        for i, record in enumerate(report.records)
        if record.diverged and i not in report.simulation.stopped_trials
    }


def write_stop(directory: Path, stopped: Stopped) -> None:
    """Write a decision into a run directory."""
    line = {"format": FORMAT, **stopped._asdict()}
    write_json(directory / STOPPED, line, spec=directory / "spec.toml")


class TrainingStorage(abc.ABC):
    """Stores the results of a training loop."""

    path: Path | None  # directory of the results; None if nothing is stored
    keeps_models: bool = False  # True if the last checkpoint of a trial is a result

    @abc.abstractmethod
    def append(self, report: RoundReport) -> RoundReport:
        """Log a round; return it with additional evaluations, if there are any."""

    @abc.abstractmethod
    def save(self, simulation: Simulation, stopping: Collection[int]) -> None:
        """Write a checkpoint; ``stopping`` are trials for which it is the last one."""

    @abc.abstractmethod
    def note_change(self, simulation: Simulation, name: str) -> None:
        """Record the clients at once (``chunk_changes``) or trials left (``pack_changes``)."""

    @abc.abstractmethod
    def early_stops(self, report: RoundReport) -> Collection[int]:
        """Decide and record early stops; return the trials that stop after this round."""


def training_loop(
    simulation: Simulation, storage: TrainingStorage, progress: Progress, *, held: lock.Hold,
    end: float, checkpoint_seconds: float,
) -> None:  # fmt: skip
    """Train the remaining rounds of a simulation and store every one.

    The locks ``held`` are checked before every write. The time ``end`` raises
    ``TimeLimitReached``, Ctrl-C raises ``Interrupted``; everything finished is stored then. There
    are ``checkpoint_seconds`` between checkpoints, more if they take long to write; 0 writes one
    after every round.
    """
    rounds, interval, saved_at = simulation.rounds, checkpoint_seconds, time.monotonic()
    if simulation.choice.fallback:
        progress.say(simulation.choice.reason)
    try:
        with deferred_interrupt(progress) as requested:
            finished = simulation.round == rounds
            while not finished:
                with named_write_errors(storage.path):
                    chunk, report = simulation.chunk, simulation.run_round()
                    held.check()
                    if simulation.chunk != chunk:
                        now = f"from here on {simulation.chunk} clients train at once"
                        progress.say(f"round {report.round}: out of memory; {now}")
                        storage.note_change(simulation, "chunk_changes")
                    report = storage.append(report)
                    stopping, spent = storage.early_stops(report), time.monotonic() >= end
                    active = len(simulation.trials) - len(simulation.stopped_trials)
                    finished = simulation.round == rounds or len(stopping) == active
                    ends = storage.keeps_models and (finished or bool(stopping))
                    leaves = (requested.is_set() or spent) and not finished
                    late = time.monotonic() - saved_at > interval and not finished
                    is_due = ends or leaves or late
                    if is_due:
                        began = time.monotonic()
                        storage.save(simulation, stopping)
                        saved_at = time.monotonic()
                        if interval > 0:
                            interval = max(interval, (saved_at - began) / CHECKPOINT_SHARE)
                    if stopping:
                        simulation.stop(stopping)
                        storage.note_change(simulation, "pack_changes")
                progress.advance(report)
                if requested.is_set():
                    # Also after the last round: other packs may follow, which must not begin.
                    if not is_due and not finished:
                        with named_write_errors(storage.path):
                            storage.save(simulation, ())
                    raise KeyboardInterrupt
                if spent and not finished:
                    raise TimeLimitReached(simulation.round, rounds)
    except KeyboardInterrupt:
        raise Interrupted(simulation.round, rounds, kept=storage.path is not None) from None


def build_simulation(
    task: Task, trials: Sequence[Trial], spec: RunSpec | Plan, memory: Sequence[Path] | None, *,
    facts: Mapping[str, Any] | None = None, device: torch.device | None = None,
    chunk: int | None = None, trainings: int = 1, restored: Sequence[Checkpoint] | None = None,
    shards: Shards | None = None, engines: EnginePlanner | None = None,
) -> Simulation:  # fmt: skip
    """Build a simulation with the device, dtype, engine and precision of a specification.

    ``memory`` has a directory of client memory per trial. ``facts`` is the manifest of an earlier
    part; another execution path would change the last bits, and so may another ``chunk``, the
    number of clients that train at once. ``trainings`` simulations share compiled code. ``shards``
    are those of other processes; ``engines`` takes the place of the engines of this machine.
    """
    if chunk is None and facts:
        participation = spec.federation.build().participation
        chunk = run_directory.clients_at_once(facts, task, len(trials), participation)
    device = device or resolve_device(spec.device)
    engine: EngineChoice | EngineName = spec.engine
    if count := getattr(spec, "shards", 0):
        shards = shards or LocalShards(count)
        # Workers measure different times, but must choose the same path.
        mapped: EngineName = "cuda_graph" if device.type == "cuda" else "vectorized"
        engine = mapped if engine == "auto" else engine
    if facts:
        one = int(facts.get("threads") == 1)  # more are those of this machine
        known = facts["engine"], "as recorded", facts["onednn"]
        beside = {name: facts[name] for name in ("parallel", "channels_last") if name in facts}
        engine = EngineChoice(*known, threads=one, **beside)
    return Simulation(
        task, trials, rounds=task.protocol.rounds, device=device, dtype=DTYPES[spec.dtype],
        engine=engines or EnginePlanner(engine, chunk=chunk, trainings=trainings),
        precision=spec.precision, deterministic=spec.deterministic,
        federation=spec.federation.build(), restored=restored or None, memory_places=memory or None,
        shards=shards,
    )  # fmt: skip
