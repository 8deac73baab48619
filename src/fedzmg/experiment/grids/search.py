"""The search of one algorithm: packs of trials, one log for all of them, then scores."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.data.federated import Examples
from fedzmg.experiment import manifest, rules_hash
from fedzmg.experiment.control import Budget, named_write_errors
from fedzmg.experiment.early_stopping import Stopped, Verdict, newly_diverged
from fedzmg.experiment.grids.score import counted, score
from fedzmg.experiment.grids.stops import Stops
from fedzmg.experiment.plan_directory import read_rows
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.training import (
    TrainingStorage,
    build_simulation,
    recorded_engine,
    training_loop,
)
from fedzmg.simulation import Checkpoint, Record, RoundReport, Simulation, Trial
from fedzmg.storage.checkpoint import (
    Binding,
    StoredCheckpoint,
    UnusableCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from fedzmg.storage.formats import append_log, read_json, write_json
from fedzmg.storage.lock import Hold
from fedzmg.tasks.task import Task


class GridTrial(NamedTuple):
    """One training of a grid."""

    options: dict[str, float]
    seed: int

    def line(self, number: int, record: Record, by_test: float | None = None) -> dict[str, Any]:
        """Return the log line of an evaluated round."""
        return {
            "trial": number,
            "round": record.round,
            "seed": self.seed,
            **self.options,
            "metric": record.metric,
            **({} if by_test is None else {"test_metric": by_test}),
            "loss": record.loss,
            "train_loss": record.train_loss,
            "diverged": record.diverged,
            "seconds": record.seconds,
        }


def trials_of(spec: GridSpec, name: str) -> list[GridTrial]:
    """Return every point under every seed; the position of a trial is its number."""
    return [GridTrial(point, seed) for point in spec.points(name) for seed in spec.seeds]


def packs(spec: GridSpec, trials: Sequence[int]) -> list[list[int]]:
    """Group the numbers of trials that train together."""
    size = spec.together or max(len(trials), 1)
    return [list(trials[i : i + size]) for i in range(0, len(trials), size)]


def built(spec: GridSpec, name: str, task: Task, trials: Iterable[GridTrial]) -> list[Trial]:
    """Build trials with their algorithm."""
    fixed = spec.fixed(name)
    return [
        Trial(spec.configured(name, {**fixed, **trial.options}, task), trial.seed)
        for trial in trials
    ]


def by_test(
    spec: GridSpec, simulation: Simulation, records: Sequence[Record], reporting: Examples
) -> dict[int, float]:
    """Evaluate trials on all test examples, after a round that counts.

    ``records`` are evaluated on the examples that choose; ``reporting`` are the other examples.
    """
    if simulation.round not in counted(spec):
        return {}
    worst = simulation.task.metric.worst
    sizes, found = (simulation.task.test.size, reporting.size), dict[int, float]()
    for i, other in enumerate(simulation.evaluate(reporting)):
        metric = records[i].metric
        if metric is not None and i not in simulation.stopped_trials:
            lost = records[i].diverged or not math.isfinite(other.loss)
            mean = (sizes[0] * metric + sizes[1] * other.metric) / sum(sizes)
            found[i] = worst if lost else mean
    return found


def evaluated(spec: GridSpec, simulation: Simulation, records: list[Record]) -> list[Record]:
    """Evaluate the records of a round if it counts or halves the grid."""
    counts = simulation.round in counted(spec)
    due = counts or simulation.round in spec.stop.heuristic_halving
    active = [i for i in range(len(records)) if i not in simulation.stopped_trials]
    if not due or records[active[0]].metric is not None:
        return records
    worst = simulation.task.metric.worst
    found, scores = list(records), simulation.evaluate()
    for i in active:
        loss, metric = scores[i]
        lost = records[i].diverged or not math.isfinite(loss)
        found[i] = records[i]._replace(
            loss=loss,
            metric=worst if lost else metric,
            # An infinite loss in between is not final: it may become finite again.
            diverged=lost if counts else records[i].diverged,
        )
    return found


class Search:
    """Trains and scores the points of one algorithm under all seeds."""

    def __init__(
        self,
        spec: GridSpec,
        name: str,
        task: Task,
        directory: Path,
        progress: Progress,
        budget: Budget,
        checkpoint_seconds: float,
        held: Hold,
        reporting: Examples | None = None,
    ) -> None:
        self.spec, self.name, self.task, self.directory = spec, name, task, directory
        self.progress, self.budget, self.held = progress, budget, held
        self.checkpoint_seconds = checkpoint_seconds
        self.reporting = reporting
        """Examples that report, if points are scored on them too."""
        self.log = directory / "metrics.jsonl"
        self.rows = read_rows(self.log)
        self.stops = Stops(spec, name, task.metric, directory / "stopped.jsonl")
        self.trials = trials_of(spec, name)
        self.lost: set[int] = set()
        """Trials that this process saw diverge."""

    def run(self) -> None:
        """Train pack after pack, then score."""
        for pack in packs(self.spec, range(len(self.trials))):
            # A stopped trial whose decision was revoked trains below.
            if not all(i in self.stops.revoked or self.is_logged([i]) for i in pack):
                self._train(pack)
        while True:
            if self.spec.stop.cannot_win:
                with named_write_errors(self.directory):
                    self.stops.revoke(self.stops.unsettled(self.rows))
            left = [i for i in sorted(self.stops.revoked) if not self.is_logged([i])]
            if not left:
                break
            self.progress.say(
                f"{self.name}: {len(left)} stopped trials might win after all: they are trained "
                "to the end"
            )
            for pack in packs(self.spec, left):
                self._train(pack)
        with named_write_errors(self.directory):
            scores = score(self.spec, self.name, self.task, self.rows, self.stops.now)
            write_json(self.directory / "scores.json", scores)
            # Only now: a scored grid never trains again.
            shutil.rmtree(self.directory / "memory", ignore_errors=True)

    def is_logged(self, members: Iterable[int], until: int | None = None) -> bool:
        """Return whether the log has all rounds that count, up to round ``until``."""
        end = self.spec.rounds if until is None else until
        for i in members:
            stop = self.stops.now.get(i)
            last = end if stop is None else min(end, stop.round)
            if any((i, r) not in self.rows for r in counted(self.spec) if r <= last):
                return False
        return True

    def decide(self, pack: list[int], active: list[int], report: RoundReport) -> Verdict:
        """Check the time limit and find trials to stop."""
        stop, found = self.spec.stop, dict[int, Stopped]()
        diverged = {active[i]: s for i, s in newly_diverged(report).items()}
        self.lost |= set(diverged)
        # Stopping after the last round saves nothing.
        fresh = report.round < self.spec.rounds and not self.stops.revoked.intersection(pack)
        if stop.diverged:
            found |= diverged
        if stop.cannot_win and fresh:
            found |= self.stops.dominated(self.rows, pack, report.round, self.lost) | found
        if report.round in stop.heuristic_halving and fresh:
            found |= self.stops.worse_half(self.rows, report.round) | found
        self.stops.keep(found, [{"seed": t.seed, **t.options} for t in self.trials])
        # Decisions from before a crash take effect after the same round.
        now = self.stops.now
        due = {i: now[t] for i, t in enumerate(active) if t in now and now[t].round == report.round}
        return Verdict(self.budget.spent, due)

    def _train(self, pack: list[int]) -> None:
        with named_write_errors(self.directory):
            storage = _PackStorage(self, pack)
            kept = storage.load()
            done, stops = 0 if kept is None else kept.round, self.stops.now
            active = [i for i in pack if i not in stops or stops[i].round > done]
            if kept is None:
                # No checkpoint needs the client memory, which a crash may have left incomplete.
                for i in pack:
                    shutil.rmtree(self._memory(i), ignore_errors=True)
            if not active:
                return
            storage.active = active
            self.progress.begin(self.name, self.spec.rounds, done)
            simulation = self._simulation(active, kept)
            facts = read_json(self.directory / "manifest.json")
            algorithm = simulation.trials[0].algorithm
            changes = rules_hash.continued(facts, algorithm, done, pack[0])
            manifest.note(self.directory, **changes)
        began = time.monotonic()
        try:
            training_loop(
                simulation, storage, self.progress,
                held=self.held,
                stop=lambda report: self.decide(pack, active, report),
                checkpoint_seconds=self.checkpoint_seconds,
            )  # fmt: skip
        finally:
            seconds = facts.get("seconds", 0.0) + time.monotonic() - began
            manifest.note(self.directory, seconds=seconds)
            if simulation.round == self.spec.rounds or simulation.all_stopped:
                storage.checkpoint.unlink(missing_ok=True)

    def _simulation(self, active: list[int], kept: StoredCheckpoint | None) -> Simulation:
        spec, facts = self.spec, known_facts(self.directory, self.task)
        tensors = {} if kept is None else kept.tensors
        simulation = build_simulation(
            self.task,
            built(spec, self.name, self.task, [self.trials[i] for i in active]),
            spec,
            [self._memory(i) for i in active],
            recorded=recorded_engine(facts) if facts else None,
            chunk=manifest.chunk(facts, self.task, len(active)) if facts else None,
            trainings=sum(spec.packs().values()),
            restored=[Checkpoint(kept.round, dict(tensors[i])) for i in active] if kept else None,
        )
        if not facts:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / "manifest.json", manifest.describe(simulation))
        return simulation

    def _memory(self, trial: int) -> Path:
        return self.directory / "memory" / f"trial-{trial}"


class _PackStorage(TrainingStorage):
    """One pack of a grid directory: a shared log and one checkpoint for all trials."""

    def __init__(self, search: Search, pack: list[int]) -> None:
        self._search, self._pack = search, pack
        self.path: Path | None = search.directory
        self.active = pack
        """Numbers of the simulation's trials."""
        self.checkpoint = search.directory / "checkpoint.safetensors"
        seeds = tuple(search.trials[i].seed for i in pack)
        self._binding = Binding.to_file(search.directory.parent / "grid.toml", seeds, tuple(pack))

    def load(self) -> StoredCheckpoint | None:
        """Read the pack's checkpoint; report one that cannot be used."""
        search = self._search
        try:
            found = read_checkpoint(self.checkpoint, self._binding)
            if not search.is_logged(self._pack, until=found.round):
                raise UnusableCheckpoint("metrics.jsonl lacks rounds before it")
            stops = search.stops.now
            wanted = {i for i in self._pack if i not in stops or stops[i].round > found.round}
            if not wanted <= set(found.tensors):
                raise UnusableCheckpoint("it lacks trials that stopped.jsonl does not stop")
        except FileNotFoundError:
            return None
        except UnusableCheckpoint as error:
            search.progress.say(
                f"{self.checkpoint} cannot be used ({error}): {search.name} starts again from "
                "round 1"
            )
            return None
        return found

    def append(self, report: RoundReport) -> RoundReport:
        search, simulation = self._search, report.simulation
        report = report._replace(records=evaluated(search.spec, simulation, report.records))
        others: Mapping[int, float] = {}
        if search.reporting is not None:
            others = by_test(search.spec, simulation, report.records, search.reporting)
        lines = [
            search.trials[trial].line(trial, record, others.get(i))
            for i, (trial, record) in enumerate(zip(self.active, report.records, strict=True))
            if record.metric is not None
        ]
        if lines:
            append_log(search.log, lines)
            search.rows |= {(line["trial"], line["round"]): line for line in lines}
        return report

    def save(self, simulation: Simulation, _: Collection[int]) -> None:
        simulation.memory.flush()
        tensors = {
            trial: simulation.checkpoint(i).tensors
            for i, trial in enumerate(self.active)
            if i not in simulation.stopped_trials
        }
        stored = StoredCheckpoint(simulation.round, simulation.round, tensors)
        write_checkpoint(self.checkpoint, stored, self._binding)
        simulation.memory.commit(simulation.round)

    def note_chunk(self, round_: int, chunk: int | None) -> None:
        change = {"pack": self._pack[0], "round": round_, "chunk": chunk}
        manifest.note(self._search.directory, chunk_changes=[*self._facts("chunk_changes"), change])

    def note_pack(self, simulation: Simulation) -> None:
        left = [t for i, t in enumerate(self.active) if i not in simulation.stopped_trials]
        changes = {(c["pack"], c["round"]): c for c in self._facts("pack_changes")}
        key = self._pack[0], simulation.round
        changes[key] = {"pack": key[0], "round": key[1], "trials": left}
        manifest.note(self._search.directory, pack_changes=list(changes.values()))

    def _facts(self, name: str) -> list[dict[str, Any]]:
        return list(read_json(self._search.directory / "manifest.json").get(name, []))


def known_facts(directory: Path, task: Task) -> dict[str, Any]:
    """Read the manifest of a search; it is empty before the search began."""
    path = directory / "manifest.json"
    facts = read_json(path) if path.exists() else {}
    manifest.refuse_other_task(directory, facts, task)
    return facts
