"""Runs: trials of equal structure that train together, each in its own run directory."""

import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.engine.choose import EnginePlanner
from fedzmg.errors import InputError
from fedzmg.experiment import run_directory, training
from fedzmg.experiment.plugin_files import PLUGINS
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.run_directory import Position, RunDirectory, change_manifest, timestamp
from fedzmg.experiment.specs.run import ResolvedRun, RunSpec
from fedzmg.simulation import RoundReport, Simulation, resolve_device
from fedzmg.simulation.history import History, Record
from fedzmg.simulation.shards import Shards
from fedzmg.storage.client_metrics import ClientMetrics
from fedzmg.storage.files import log_marks
from fedzmg.storage.formats import flat, read_json
from fedzmg.storage.lock import hold, is_left_locked
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

CHECKPOINT_SECONDS = 10.0


class Job(NamedTuple):
    """A run and the state of its directory."""

    run: ResolvedRun
    directory: RunDirectory | None = None
    facts: Mapping[str, Any] | None = None  # manifest of a run that has begun
    position: Position | None = None
    done: int = 0  # rounds that need not be repeated
    complete: bool = False  # True if nothing is left to train
    records: Sequence[Record] = ()
    clients: tuple[ClientMetrics, ...] = ()
    stopped: training.Stopped | None = None  # the decision to stop it early, if there is one

    @property
    def is_marked(self) -> bool:
        """True if the manifest has the time of its end, or the directory is read-only."""
        assert self.directory is not None
        assert self.facts is not None
        return "finished" in self.facts or not os.access(self.directory.path, os.W_OK)

    @property
    def before(self) -> int:
        """Round of the previous checkpoint."""
        return 0 if self.position is None else self.position.before


def run_pack(
    task: Task, specs: Sequence[RunSpec | ResolvedRun], paths: Sequence[Path] | None = None, *,
    progress: Progress | None = None, checkpoint_seconds: float | None = None,
    stop: training.Ask | None = None, end: float = math.inf, label: str | None = None,
    models: bool = True, shards: Shards | None = None, engines: EnginePlanner | None = None,
) -> list[History]:  # fmt: skip
    """Train runs that differ only in numbers and seeds; return one history each.

    An existing directory in ``paths`` is continued or, if complete, read. ``stop`` is called after
    every round; a run that it stops has fewer records than rounds and a ``stopped.json``. Without
    ``models``, a finished run needs no checkpoints. ``shards`` train in other processes;
    ``engines`` takes the place of the engines of this machine. Runs that cannot continue raise
    ``InputError``; other errors are those of :func:`training.training_loop`.
    """
    progress = progress or Silent()
    runs = [spec.resolve(task) for spec in specs]
    first = runs[0].spec
    first.check_participation(task)
    label = label or first.algorithm
    task = replace(task, protocol=first.build_protocol(task))
    rounds = task.protocol.rounds
    seconds = training.checkpoint_interval(CHECKPOINT_SECONDS, checkpoint_seconds)
    directories = [RunDirectory(path) for path in paths] if paths else [None] * len(runs)
    # Finished runs are only read: they need no lock and may be read-only. A lock that a killed
    # process left is taken over and removed.
    jobs = [_open_job(task, *pair, models=models) for pair in zip(runs, directories, strict=True)]
    together = not all(job.complete for job in jobs) and _must_stay_together(first)
    to_hold = {
        i: job.directory
        for i, job in enumerate(jobs)
        if job.directory is not None
        and (together or not (job.complete and job.is_marked) or is_left_locked(job.directory.path))
    }
    with hold([directory.path for directory in to_hold.values()], progress.say) as held:
        for i, directory in to_hold.items():
            # In a pack that stays together, a run without a checkpoint can only start again.
            jobs[i] = _open_job(task, runs[i], directory, progress, models=models or together)
            if jobs[i].complete and not jobs[i].is_marked:
                # It was killed after its last checkpoint.
                with training.named_write_errors(directory.path):
                    change_manifest(directory.path, finished=timestamp())
        if together:
            least = min((job.done for job in jobs if not job.complete), default=rounds)
            for i, directory in to_hold.items():
                if jobs[i].done > least:
                    progress.say(f"{directory.path}: back to round {least}, where its pack is")
                    jobs[i] = _open_job(task, runs[i], directory, progress, until=least)
        histories: dict[int, History] = {}
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, job in enumerate(jobs):
            if job.complete:
                params = Tree({}) if job.position is None else job.position.checkpoint.params()
                histories[i] = History(task, job.run.trial, tuple(job.records), params, job.clients)
            else:
                # A crash between two checkpoints leaves runs at different rounds. Packing does not
                # change a bit, so they continue in separate packs.
                names = "engine", "onednn", "parallel", "channels_last"
                groups[job.done, job.before, *map((job.facts or {}).get, names)].append(i)
        if not groups:
            progress.begin(label, rounds, rounds)
        for (done, *_), members in groups.items():
            progress.begin(label, rounds, done)
            with training.named_write_errors(paths[members[0]] if paths else None):
                own = [jobs[i] for i in members]
                storage = RunStorage(task, own, progress, stop, shards, engines)
            training.training_loop(
                storage.simulation, storage, progress,
                held=held, end=end, checkpoint_seconds=seconds,
            )  # fmt: skip
            found = storage.simulation.histories(storage.records)
            for i, history, clients in zip(members, found, storage.clients, strict=True):
                histories[i] = replace(history, clients=tuple(clients))
    return [histories[i] for i in range(len(jobs))]


def _open_job(
    task: Task, run: ResolvedRun, directory: RunDirectory | None, progress: Progress | None = None,
    until: int | None = None, *, models: bool = True,
) -> Job:  # fmt: skip
    """Read a run directory, which must hold this run; with ``progress``, also repair it."""
    job = Job(run, directory)
    if directory is None:
        return job
    if directory.exists:
        settings = [flat(spec.model_dump()) for spec in (directory.spec(), run.spec)]
        if settings[0] != settings[1]:
            difference = training.first_difference(*settings)
            another = f"holds another run ({difference}): {training.ANOTHER}"
            raise InputError(f"{directory.path} {another}")
        facts = directory.manifest()
        run_directory.refuse_other_task(directory.path, facts, task)
        records = {record.round: record for record in directory.records()}
        path, stopped = directory.path / training.STOPPED, None
        if path.exists():
            known = read_json(path, wanted=training.FORMAT, spec=path.with_name("spec.toml"))
            stopped = training.Stopped.of(known)
        last = task.protocol.rounds if stopped is None else stopped.round
        logged = "finished" in facts and records.keys() >= set(range(1, last + 1))
        if logged and not models:
            # Nothing continues from its checkpoints: they are neither read nor repaired.
            position, done, progress = None, last, None
        else:
            position = directory.position(logged=records, until=until)
            done = 0 if position is None else position.checkpoint.round
        job = Job(
            run, directory, facts, position, done, complete=done >= last,
            records=[records[round_] for round_ in range(1, done + 1)],
            clients=directory.clients(until=done), stopped=stopped,
        )  # fmt: skip
    if progress is not None:
        if until is None and job.position is not None and job.position.rejected:
            progress.say(f"{job.position.rejected}: continuing from round {job.done}")
        with training.named_write_errors(directory.path):
            directory.repair(job.position)
    return job


def _must_stay_together(spec: RunSpec) -> bool:
    """Return whether a pack must not split: on a GPU its width changes the last bits."""
    return spec.deterministic and resolve_device(spec.device).type == "cuda"


class RunStorage(training.TrainingStorage):
    """Run directories of runs that are at the same round; nothing is stored without them."""

    keeps_models = True

    def __init__(
        self, task: Task, jobs: Sequence[Job], progress: Progress, stop: training.Ask | None,
        shards: Shards | None = None, engines: EnginePlanner | None = None,
    ) -> None:  # fmt: skip
        first, self._jobs, self._stop = jobs[0], list(jobs), stop or (lambda _: {})
        self._directories = {i: j.directory for i, j in enumerate(jobs) if j.directory is not None}
        self.path = self._directories[0].path if self._directories else None
        self.records = [list(job.records) for job in jobs]
        self.clients = [list(job.clients) for job in jobs]
        chunks = (first.facts or {}).get("chunk_changes")
        self.simulation = training.build_simulation(
            task, [job.run.trial for job in jobs], first.run.spec,
            [directory.path for directory in self._directories.values()], facts=first.facts,
            chunk=chunks[-1]["chunk"] if chunks else None,
            restored=[job.position.checkpoint for job in jobs if job.position is not None],
            shards=shards, engines=engines,
        )  # fmt: skip
        self._saved_round = self.simulation.round
        # Also protect what the checkpoint before needs, in case the newest gets damaged.
        self.simulation.memory.commit(first.before, self._saved_round)
        now = run_directory.describe_training(self.simulation)
        for i, directory in self._directories.items():
            facts = jobs[i].facts
            if facts is None:
                directory.create(jobs[i].run.spec, now)
                continue
            for name in ("torch", "device", "threads", "platform"):
                if (then := facts.get(name)) != now[name]:
                    what = f"began with {name} {then} and continues with {now[name]}"
                    progress.say(f"{directory.path} {what}: the last bits may differ")
            changes = {PLUGINS: now.get(PLUGINS)} if self._saved_round == 0 else {}
            change_manifest(directory.path, finished=None, logs=None, **changes)

    def append(self, report: RoundReport) -> RoundReport:
        simulation = report.simulation
        active = [i for i in range(len(self._jobs)) if i not in simulation.stopped_trials]
        for i in active:
            self.records[i].append(report.records[i])
            if i in self._directories:
                self._directories[i].append(report.records[i])
        every = self._jobs[0].run.spec.client_metrics_every
        is_due = every > 0 and (simulation.round - 1) % every == 0
        if not simulation.engines.remote and (is_due or simulation.round == simulation.rounds):
            found = simulation.evaluate_clients()
            for i in active:
                self.clients[i].append(found[i])
        return report

    def early_stops(self, report: RoundReport) -> Collection[int]:
        # Decisions are written before the checkpoint of this round: after a crash in between, the
        # round is repeated and the decision stays. An earlier one takes effect at its own round.
        known = {i: job.stopped for i, job in enumerate(self._jobs) if job.stopped is not None}
        new = {i: decision for i, decision in self._stop(report).items() if i not in known}
        for i in self._directories.keys() & new:
            training.write_stop(self._directories[i].path, new[i])
        return sorted({*new, *(i for i, one in known.items() if one.round == report.round)})

    def save(self, simulation: Simulation, stopping: Collection[int]) -> None:
        before, ended = self._saved_round, simulation.round == simulation.rounds
        active = [i for i in self._directories if i not in simulation.stopped_trials]
        simulation.memory.flush()
        for i in active:
            directory, checkpoint = self._directories[i], simulation.checkpoint(i)
            # Evaluations of clients come first, so that a checkpoint never lacks them.
            if self.clients[i] and self.clients[i][-1].round > before:
                directory.save_clients(self.clients[i])
            directory.save(checkpoint, before, simulation.memory.mark(i, simulation.round))
        # Only now may memory that the checkpoint before the last needs be overwritten.
        simulation.memory.commit(before, simulation.round)
        self._saved_round = simulation.round
        for i in active:
            # The log alone does not tell: its last line precedes the last checkpoint.
            if ended or i in stopping:
                path = self._directories[i].path
                change_manifest(path, finished=timestamp(), logs=log_marks(path, run_directory.LOG))

    def note_change(self, simulation: Simulation, name: str) -> None:
        names = run_directory.member_names(simulation)
        left = [i for i in range(len(self._jobs)) if i not in simulation.stopped_trials]
        pack = {"pack": [names[i] for i in left]}
        fact = {"chunk": simulation.chunk} if name == "chunk_changes" else pack
        for i in self._directories.keys() & left:
            change = {"round": simulation.round, **fact}
            run_directory.note_change(self._directories[i].path, name, change)
