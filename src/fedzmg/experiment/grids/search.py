"""The search of one algorithm: packs of trials, one log for all of them, then scores."""

import math
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedzmg.data.federated import Examples
from fedzmg.engine.client_memory import DamagedMemory, check_memory
from fedzmg.experiment import run_directory, training
from fedzmg.experiment.grids import proposals
from fedzmg.experiment.grids.score import Stops, counted, read_rows, score
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.simulation import Checkpoint, Record, RoundReport, Simulation, Trial
from fedzmg.storage import checkpoint as stored
from fedzmg.storage.files import changed_log, log_marks
from fedzmg.storage.formats import append_log, log_lines, write_json
from fedzmg.storage.lock import Hold
from fedzmg.tasks.task import Task
from fedzmg.tree import tree_map

LOGS = ("metrics.jsonl", "stopped.jsonl")
CHECKPOINT = "checkpoint.safetensors"
PACKS = "packs"  # has directories of packs that other processes train, with logs and a checkpoint


class GridTrial(NamedTuple):
    """One training of a grid."""

    options: dict[str, float]
    seed: int

    def line(self, number: int, record: Record, by_test: float | None = None) -> dict[str, Any]:
        return {
            "trial": number, "round": record.round, "seed": self.seed, **self.options,
            "metric": record.metric, **({} if by_test is None else {"test_metric": by_test}),
            "loss": record.loss, "train_loss": record.train_loss, "diverged": record.diverged,
            "seconds": record.seconds,
        }  # fmt: skip


def trials_of(spec: GridSpec, name: str) -> list[GridTrial]:
    """Return every point under every seed; the position of a trial is its number."""
    return [GridTrial(point, seed) for point in spec.points(name) for seed in spec.seeds]


def built(spec: GridSpec, name: str, task: Task, trials: Iterable[GridTrial]) -> list[Trial]:
    """Build trials with their algorithm."""
    own = {**spec.fixed(name)}
    return [Trial(spec.configured(name, own | one.options, task), one.seed) for one in trials]


def by_test(
    spec: GridSpec, simulation: Simulation, records: Sequence[Record], reporting: Examples
) -> dict[int, float]:
    """Evaluate trials on all test examples; ``records`` have those that choose."""
    if simulation.round not in counted(spec):
        return {}
    sizes, found = (simulation.task.test.size, reporting.size), dict[int, float]()
    if simulation.task.metric.finish is not None:  # not a mean: both parts are evaluated together
        reporting = tree_map(lambda *pair: torch.cat(pair), simulation.task.test, reporting)
        sizes = (0, reporting.size)
    for i, other in enumerate(simulation.evaluate(reporting)):
        metric = records[i].metric
        if metric is not None and i not in simulation.stopped_trials:
            lost = records[i].diverged or not math.isfinite(other.loss)
            mean = (sizes[0] * metric + sizes[1] * other.metric) / sum(sizes)
            found[i] = simulation.task.metric.worst if lost else mean
    return found


def evaluated(spec: GridSpec, simulation: Simulation, records: list[Record]) -> list[Record]:
    """Evaluate the records of a round if the grid logs it."""
    counts = simulation.round in counted(spec)
    active = [i for i in range(len(records)) if i not in simulation.stopped_trials]
    if simulation.round not in spec.logged() or records[active[0]].metric is not None:
        return records
    found, scores = list(records), simulation.evaluate()
    for i in active:
        loss, metric = scores[i]
        lost = records[i].diverged or not math.isfinite(loss)
        found[i] = records[i]._replace(
            loss=loss,
            metric=simulation.task.metric.worst if lost else metric,
            # An infinite loss in between is not final: it may become finite again.
            diverged=lost if counts else records[i].diverged,
        )
    return found


@dataclass(eq=False)
class Search(training.TrainingStorage):
    """Trains and scores an algorithm's points; packs share a log, the current has a checkpoint."""

    spec: GridSpec
    name: str
    task: Task
    path: Path
    progress: Progress
    end: float
    checkpoint_seconds: float
    held: Hold
    reporting: Examples | None = None  # the other test examples, if they are evaluated as well

    def __post_init__(self) -> None:
        self._rows = read_rows(self.path / "metrics.jsonl")
        self._stops = Stops(self.spec, self.name, self.task.metric, self.path / "stopped.jsonl")
        self._trials = trials_of(self.spec, self.name)
        self._pack: list[int] = []
        self._active: list[int] = []  # numbers of the simulation's trials
        self._checkpoint, self._plan = self.path / CHECKPOINT, self.path.parent / "grid.toml"

    def run(self) -> None:
        own = self.spec, self.name, self.path, self.task, self._rows, self._stops.now
        for pack in proposals.all_packs(*own):
            self.train(pack)
        with training.named_write_errors(self.path):
            scores = score(self.spec, self.name, self.task, self._rows, self._stops.now)
            write_json(self.path / "scores.json", scores, spec=self._plan)

    def _is_logged(self, members: Iterable[int], until: int | None = None) -> bool:
        """Return whether the log has all rounds that are evaluated, up to round ``until``."""
        end = self.spec.rounds if until is None else until
        stops = self._stops.now
        lasts = {i: min(end, stops[i].round) if i in stops else end for i in members}
        rounds = self.spec.logged()
        return all((i, r) in self._rows for i, last in lasts.items() for r in rounds if r <= last)

    def early_stops(self, report: RoundReport) -> Collection[int]:
        stops, found = self._stops, dict[int, training.Stopped]()
        if self.spec.stop.diverged:
            found |= {self._active[i]: s for i, s in training.newly_diverged(report).items()}
        if self._pack[0] % len(self.spec.seeds) == 0:  # a pack of first seeds
            found = stops.halved(self._rows, self._pack, report.round) | found
        stops.keep(found)
        # Decisions from before a crash take effect after the same round.
        due = {trial for trial, stopped in stops.now.items() if stopped.round == report.round}
        return [i for i, trial in enumerate(self._active) if trial in due]

    def train(self, pack: list[int]) -> None:
        if self._is_logged(pack):
            return
        self._pack = pack
        memory = {i: self._memory(i) for i in pack}
        with training.named_write_errors(self.path):
            kept = self._load()
            done = 0 if kept is None else kept.round
            self._active = self._left(done)
            if kept is None:
                # No checkpoint needs the client memory, which a crash may have left incomplete.
                for path in memory.values():
                    shutil.rmtree(path, ignore_errors=True)
            if not self._active:
                return
            self.progress.begin(self.name, self.spec.rounds, done)
            facts = known_facts(self.path, self.task)
            trials = [self._trials[i] for i in self._active]
            simulation = training.build_simulation(
                self.task, built(self.spec, self.name, self.task, trials), self.spec,
                [memory[i] for i in self._active], facts=facts,
                trainings=sum(self.spec.packs().values()),
                restored=kept and [Checkpoint(done, dict(kept.tensors[i])) for i in self._active],
            )  # fmt: skip
            if not facts:
                facts = run_directory.describe_training(simulation)
                self.path.mkdir(parents=True, exist_ok=True)
                write_json(self.path / "manifest.json", facts, spec=self._plan)
        began = time.monotonic()
        try:
            training.training_loop(
                simulation, self, self.progress,
                held=self.held, end=self.end, checkpoint_seconds=self.checkpoint_seconds,
            )  # fmt: skip
        finally:
            seconds = facts.get("seconds", 0.0) + time.monotonic() - began
            with training.named_write_errors(self.path):
                logs = log_marks(self.path, *LOGS)
                run_directory.change_manifest(self.path, seconds=seconds, logs=logs)
                if simulation.round == self.spec.rounds or simulation.all_stopped:
                    self._checkpoint.unlink(missing_ok=True)

    def _memory(self, trial: int) -> Path:
        return self.path / "memory" / f"trial-{trial}"

    def _left(self, done: int) -> list[int]:
        stops = self._stops.now
        return [i for i in self._pack if i not in stops or stops[i].round > done]

    @property
    def _binding(self) -> str:
        return stored.bound_to(self._plan, self._pack, self.name)

    def _load(self) -> stored.StoredCheckpoint | None:
        """Read the pack's checkpoint; report one that cannot be used."""
        try:
            found = stored.read_checkpoint(self._checkpoint, self._binding)
            if not self._is_logged(self._pack, until=found.round):
                raise stored.UnusableCheckpoint("metrics.jsonl lacks rounds before it")
            if not set(found.tensors).issuperset(self._left(found.round)):
                raise stored.UnusableCheckpoint("it lacks trials that stopped.jsonl does not stop")
            if log := changed_log(self.path, found.logs):
                raise stored.UnusableCheckpoint(f"{log} is damaged or of another grid")
            for trial, mark in found.memory.items():
                check_memory(self._memory(trial), found.round, mark)
        except FileNotFoundError:
            return None
        except (stored.UnusableCheckpoint, DamagedMemory) as error:
            unusable = f"{self._checkpoint} cannot be used ({error})"
            self.progress.say(f"{unusable}: {self.name} starts again from round 1")
            return None
        return found

    def append(self, report: RoundReport) -> RoundReport:
        simulation, others = report.simulation, dict[int, float]()
        report = report._replace(records=evaluated(self.spec, simulation, report.records))
        if self.reporting is not None:
            others = by_test(self.spec, simulation, report.records, self.reporting)
        lines = [
            self._trials[trial].line(trial, record, others.get(i))
            for i, (trial, record) in enumerate(zip(self._active, report.records, strict=True))
            if record.metric is not None
        ]
        if lines:
            append_log(self.path / "metrics.jsonl", lines)
            self._rows |= {(line["trial"], line["round"]): line for line in lines}
        return report

    def save(self, simulation: Simulation, _: Collection[int]) -> None:
        simulation.memory.flush()
        now, left = simulation.round, dict(enumerate(self._active))
        left = {i: trial for i, trial in left.items() if i not in simulation.stopped_trials}
        tensors = {trial: simulation.checkpoint(i).tensors for i, trial in left.items()}
        memory = {trial: simulation.memory.mark(i, now) for i, trial in left.items()}
        found = stored.StoredCheckpoint(now, now, tensors, log_marks(self.path, *LOGS), memory)
        stored.write_checkpoint(self._checkpoint, found, self._binding)
        simulation.memory.commit(simulation.round)

    def note_change(self, simulation: Simulation, name: str) -> None:
        left = [t for i, t in enumerate(self._active) if i not in simulation.stopped_trials]
        fact = {"chunk": simulation.chunk} if name == "chunk_changes" else {"trials": left}
        change = {"pack": self._pack[0], "round": simulation.round, **fact}
        run_directory.note_change(self.path, name, change)


def unfinished_packs(spec: GridSpec, name: str, path: Path, task: Task) -> dict[int, list[int]]:
    """Return the packs of an algorithm, by number, without the trials that its log holds."""
    rows = read_rows(path / "metrics.jsonl")
    stops = Stops(spec, name, task.metric, path / "stopped.jsonl").now
    ends = {(i, r) for i, one in stops.items() for r in spec.logged() if r > one.round}
    rounds, logged, found = spec.logged(), rows.keys() | ends, dict[int, list[int]]()
    for number, pack in enumerate(proposals.all_packs(spec, name, path, task, rows, stops)):
        if left := [i for i in pack if any((i, r) not in logged for r in rounds)]:
            found[number] = left
            if spec.search.method == "optuna":  # the next proposal needs their scores
                break
    return found


def absorb_pack(directory: Path, pack: Path) -> None:
    """Move a pack's logs and facts to its algorithm's; again after a crash: later lines win."""
    facts, plan = run_directory.read_manifest(pack), directory.parent / "grid.toml"
    changes = ("pack_changes", "chunk_changes")
    if not (directory / "manifest.json").exists():
        shared = {k: v for k, v in facts.items() if k not in ("seconds", "logs", *changes)}
        write_json(directory / "manifest.json", shared, spec=plan)
    for log in LOGS:
        if lines := log_lines(pack / log, dict):
            append_log(directory / log, lines)
    before = run_directory.read_manifest(directory)
    both = {key: before.get(key, []) + facts.get(key, []) for key in changes}
    own: dict[str, Any] = {key: value for key, value in both.items() if value}
    own["seconds"] = before.get("seconds", 0.0) + facts["seconds"]
    run_directory.change_manifest(directory, **own, logs=log_marks(directory, *LOGS))
    shutil.rmtree(pack)


def known_facts(directory: Path, task: Task) -> dict[str, Any]:
    """Read the manifest of a search; it is empty before the search began."""
    facts = run_directory.read_manifest(directory) if (directory / "manifest.json").exists() else {}
    run_directory.refuse_other_task(directory, facts, task)
    return facts
