"""The training loop of runs, studies and grids."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import Interrupted
from fedzmg.experiment import control, manifest
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.simulation import Checkpoint, RoundReport, Simulation, Trial, resolve_device
from fedzmg.storage.lock import Hold
from fedzmg.tasks.task import Task

CHECKPOINT_SHARE = 0.05
"""Largest share of the time that writing checkpoints may take."""


class TrainingStorage(Protocol):
    """Stores the results of a training loop."""

    path: Path | None = None
    """Directory of the results; None if nothing is stored."""
    keeps_models: bool = False
    """True if the last checkpoint of a trial is a result."""

    def append(self, report: RoundReport) -> RoundReport:
        """Log a round; return it with additional evaluations, if there are any."""

    def save(self, simulation: Simulation, stopping: Collection[int]) -> None:
        """Write a checkpoint; ``stopping`` are trials for which it is the last one."""

    def note_change(self, simulation: Simulation, name: str) -> None:
        """Record the number of clients that train at once, or the trials that still train.

        ``name`` is the key in the manifest, ``chunk_changes`` or ``pack_changes``.
        """

    def early_stops(self, report: RoundReport) -> Collection[int]:
        """Decide and record early stops; return the trials that stop after this round."""


def training_loop(
    simulation: Simulation,
    storage: TrainingStorage,
    progress: Progress,
    *,
    held: Hold,
    end: float,
    checkpoint_seconds: float,
) -> None:
    """Train the remaining rounds of a simulation and store every one.

    The locks ``held`` are checked before every write. The time ``end`` raises
    ``TimeLimitReached``, Ctrl-C raises ``Interrupted``; everything finished is stored then. There
    are ``checkpoint_seconds`` between checkpoints, more if they take long to write; 0 writes one
    after every round.
    """
    rounds, interval, saved_at = simulation.rounds, checkpoint_seconds, time.monotonic()
    try:
        with control.deferred_interrupt(progress) as requested:
            finished = simulation.round == rounds
            while not finished:
                with control.named_write_errors(storage.path):
                    chunk, report = simulation.chunk, simulation.run_round()
                    held.check()
                    if simulation.chunk != chunk:
                        progress.say(
                            f"round {report.round}: out of memory; from here on "
                            f"{simulation.chunk} clients train at once"
                        )
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
                        with control.named_write_errors(storage.path):
                            storage.save(simulation, ())
                    raise KeyboardInterrupt
                if spent and not finished:
                    raise control.TimeLimitReached(simulation.round, rounds)
    except KeyboardInterrupt:
        raise Interrupted(simulation.round, rounds, kept=storage.path is not None) from None


def build_simulation(
    task: Task,
    trials: Sequence[Trial],
    spec: RunSpec | Plan,
    memory: Sequence[Path] | None,
    *,
    facts: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    chunk: int | None = None,
    trainings: int = 1,
    restored: Sequence[Checkpoint] | None = None,
) -> Simulation:
    """Build a simulation with the device, dtype, engine and precision of a specification.

    ``memory`` has a directory of client memory per trial. ``facts`` is the manifest of an earlier
    part; another execution path would change the last bits. ``trainings`` simulations share
    compiled code.
    """
    engine = EngineChoice(facts["engine"], "as recorded", facts["onednn"]) if facts else spec.engine
    return Simulation(
        task,
        trials,
        rounds=task.protocol.rounds,
        device=device or resolve_device(spec.device),
        dtype=DTYPES[spec.dtype],
        engine=EnginePlanner(engine, chunk=chunk, trainings=trainings),
        precision=spec.precision,
        deterministic=spec.deterministic,
        restored=restored or None,
        memory_places=memory or None,
    )


def recorded_chunk(facts: Mapping[str, Any], task: Task, trials: int) -> int | None:
    """Return the number of clients that last trained at once; None if it is not fixed."""
    changes = facts.get("chunk_changes", [])
    return changes[-1]["chunk"] if changes else manifest.chunk(facts, task, trials)
