"""The rounds of runs that train side by side, and what is written after each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import Interrupted
from fedzmg.experiment import stopping
from fedzmg.experiment.runs import checkpoints, manifest, notes
from fedzmg.experiment.runs.job import Job
from fedzmg.experiment.specs.run import DTYPES
from fedzmg.experiment.stopping import Ask, Verdict
from fedzmg.experiment.work.budget import TimeLimitReached
from fedzmg.experiment.work.interrupt import DeferredInterrupt
from fedzmg.experiment.work.progress import Progress
from fedzmg.experiment.work.write_errors import named_write_errors
from fedzmg.simulation import EngineName, History, RoundReport, Simulation, resolve_device
from fedzmg.storage.lock import Hold
from fedzmg.tasks.task import Task


class Watch(NamedTuple):
    """What looks after the rounds of a pack."""

    progress: Progress
    checkpoint_seconds: float
    held: Hold
    stop: Ask


class PackTraining:
    """Runs that are at the same round, trained to their end.

    Args:
        task: the task with the runs' protocol.
        jobs: the runs; either all of them have a directory or none has.
        engine: the execution path.
        watch: what looks after the rounds.

    Raises:
        InputError: if a directory cannot be written.
    """

    def __init__(
        self, task: Task, jobs: Sequence[Job], engine: EngineName | EngineChoice, watch: Watch
    ) -> None:
        self._jobs, self._watch = list(jobs), watch
        self._place = next((j.directory.path for j in jobs if j.directory is not None), None)
        with named_write_errors(self._place):
            self._simulation = _simulation(task, jobs, engine)
            checkpoints.recall(jobs, self._simulation)
        for job in jobs:
            if job.directory is not None:
                if job.existed:
                    notes.warn_if_moved(job.directory, self._simulation, watch.progress)
                    notes.note_unfinished(job.directory)
                    notes.note_rules(job.directory, self._simulation)
                else:
                    job.directory.create(job.spec, manifest.describe(self._simulation))
        self._records = [list(job.records) for job in jobs]
        self._clients = [list(job.clients) for job in jobs]
        self._saved_round, self._saved = self._simulation.round, time.monotonic()

    def run(self) -> list[History]:
        """Train round after round; one history per run.

        Raises:
            InputError: if a directory cannot be written, or another process took it.
            TimeLimitReached: when the watch says so, with everything finished kept.
            Interrupted: on Ctrl-C, likewise.
        """
        simulation, progress = self._simulation, self._watch.progress
        try:
            with DeferredInterrupt(progress) as interrupt:
                finished = simulation.round == simulation.rounds
                while not finished:
                    with named_write_errors(self._place):
                        report = self._round()
                        verdict = self._watch.stop(report)
                        self._keep(report, verdict, interrupt)
                    progress.advance(report)
                    finished = simulation.round == simulation.rounds or simulation.all_stopped
                    # Also after the last round: other packs may follow, which must not begin.
                    if interrupt.asked:
                        raise KeyboardInterrupt
                    if verdict.end and not finished:
                        raise TimeLimitReached(simulation.round, simulation.rounds)
        except KeyboardInterrupt:
            kept = self._place is not None
            raise Interrupted(simulation.round, simulation.rounds, kept=kept) from None
        histories = simulation.histories(self._records)
        return [replace(h, clients=tuple(c)) for h, c in zip(histories, self._clients, strict=True)]

    def _round(self) -> RoundReport:
        """Train a round and log it."""
        simulation, chunk = self._simulation, self._simulation.chunk
        report = simulation.run_round()
        self._watch.held.check()
        if simulation.chunk != chunk:
            self._watch.progress.say(
                f"round {report.round}: out of memory; from here on "
                f"{simulation.chunk} clients train at once"
            )
            notes.note_chunk(self._jobs, report.round, simulation.chunk)
        for i, (job, record) in enumerate(zip(self._jobs, report.records, strict=True)):
            if i in simulation.stopped_trials:
                continue
            self._records[i].append(record)
            if job.directory is not None:
                job.directory.append(record)
        if self._looks_at_clients():
            for i, found in enumerate(simulation.evaluate_clients()):
                if i not in simulation.stopped_trials:
                    self._clients[i].append(found)
        return report

    def _looks_at_clients(self) -> bool:
        """Whether single clients are due after this round."""
        every, simulation = self._jobs[0].spec.client_metrics_every, self._simulation
        due = every > 0 and (simulation.round - 1) % every == 0
        return due or simulation.round == simulation.rounds

    def _keep(self, report: RoundReport, verdict: Verdict, interrupt: DeferredInterrupt) -> None:
        """Write checkpoints if they are due, and let runs rest that train no further."""
        simulation = self._simulation
        stopped = self._stopped(report, verdict)
        last = interrupt.asked or verdict.end or simulation.round == simulation.rounds
        late = time.monotonic() - self._saved > self._watch.checkpoint_seconds
        large = checkpoints.is_large(simulation, self._saved_round)
        if last or late or large or stopped:
            checkpoints.save(self._jobs, simulation, self._saved_round, self._clients)
            self._saved_round, self._saved = simulation.round, time.monotonic()
            ended = simulation.round == simulation.rounds
            notes.note_finished(
                job
                for i, job in enumerate(self._jobs)
                if i in stopped or (ended and i not in simulation.stopped_trials)
            )
        if stopped:
            simulation.stop(stopped)
            notes.note_pack(self._jobs, simulation)

    def _stopped(self, report: RoundReport, verdict: Verdict) -> list[int]:
        """Runs to train no further from now on, each with a line in its directory.

        The line is written before the checkpoint of this round: after a crash in between, the round
        is repeated and the decision kept.
        """
        found = {
            i: job.stopped
            for i, job in enumerate(self._jobs)
            if job.stopped is not None and job.stopped.round == report.round
        }
        for i, stopped in verdict.stopped.items():
            directory = self._jobs[i].directory
            # One that was stopped before goes on up to the same round.
            if self._jobs[i].stopped is None:
                found[i] = stopped
                if directory is not None:
                    stopping.write(directory.path, stopped)
        return sorted(found)


def _simulation(task: Task, jobs: Sequence[Job], engine: EngineName | EngineChoice) -> Simulation:
    first = jobs[0].spec
    resumed = [
        checkpoints.without_copies(job.position.checkpoint)
        for job in jobs
        if job.position is not None
    ]
    places = [job.directory.path for job in jobs if job.directory is not None]
    return Simulation(
        task,
        [replace(job.spec.trial(task), name=job.name) for job in jobs],
        rounds=task.protocol.rounds,
        device=resolve_device(first.device),
        dtype=DTYPES[first.dtype],
        engine=EnginePlanner(engine, chunk=notes.recorded_chunk(task, jobs)),
        precision=first.precision,
        deterministic=first.deterministic,
        restored=resumed or None,
        memory_places=places or None,
    )
