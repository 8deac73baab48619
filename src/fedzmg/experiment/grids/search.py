"""The grid of one algorithm: packs of trials, a log of the rounds that count, then scores."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import InputError, Interrupted
from fedzmg.experiment.grids import pack_file
from fedzmg.experiment.grids.log import Log, Rows
from fedzmg.experiment.grids.pack_file import PackCheckpoint, Unusable
from fedzmg.experiment.grids.score import counted, score
from fedzmg.experiment.grids.stops import Stops
from fedzmg.experiment.grids.trials import built, by_test, evaluated, packs, trials_of
from fedzmg.experiment.runs import manifest, rules
from fedzmg.experiment.runs.store import write_json
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import DTYPES
from fedzmg.experiment.stopping import Stopped, Verdict, newly_diverged
from fedzmg.experiment.work.budget import Budget, TimeLimitReached
from fedzmg.experiment.work.claims import read_json
from fedzmg.experiment.work.interrupt import DeferredInterrupt
from fedzmg.experiment.work.progress import Progress
from fedzmg.experiment.work.write_errors import named_write_errors
from fedzmg.simulation import RoundReport, Simulation, resolve_device
from fedzmg.storage.lock import Hold
from fedzmg.tasks.task import Task

CHECKPOINT_SHARE = 0.05
"""Of the time, what writing checkpoints may take: a pack of large models is gigabytes."""


class Search:
    """Trains the points of one algorithm under all seeds, and scores them."""

    def __init__(
        self,
        spec: GridSpec,
        name: str,
        task: Task,
        place: Path,
        progress: Progress,
        budget: Budget,
        checkpoint_seconds: float,
        held: Hold,
        reporting: Examples | None = None,
    ) -> None:
        self.spec, self.name, self.task, self.place = spec, name, task, place
        self.progress, self.budget, self.held = progress, budget, held
        self.checkpoint_seconds = checkpoint_seconds
        self.reporting = reporting
        """Examples that report, if points are scored on them too."""
        self.log = Log(place / "metrics.jsonl")
        self.rows: Rows = self.log.read()
        self.stops = Stops(spec, name, task.metric, place / "stopped.jsonl")
        self.trials = trials_of(spec, name)
        self.lost: set[int] = set()
        """Trials that have diverged, as far as this process saw."""

    def run(self) -> None:
        """Train pack after pack, then score."""
        for pack in packs(self.spec, range(len(self.trials))):
            # One that was stopped and is to be trained after all has its turn below.
            if not all(i in self.stops.revoked or self._logged([i]) for i in pack):
                self._train(pack)
        while True:
            if self.spec.stop.cannot_win:
                with named_write_errors(self.place):
                    self.stops.revoke(self.stops.unsettled(self.rows))
            again = [i for i in sorted(self.stops.revoked) if not self._logged([i])]
            if not again:
                break
            self.progress.say(
                f"{self.name}: {len(again)} stopped trials might win after all: they are trained "
                "to the end"
            )
            for pack in packs(self.spec, again):
                self._train(pack)
        with named_write_errors(self.place):
            scores = score(self.spec, self.name, self.task, self.rows, self.stops.now)
            write_json(self.place / "scores.json", scores)
            # Only now: a grid that is scored never trains again.
            (self.place / "checkpoint.safetensors").unlink(missing_ok=True)
            shutil.rmtree(self.place / "memory", ignore_errors=True)

    def _logged(self, members: Iterable[int], until: int | None = None) -> bool:
        """Whether the log has all rounds that count, up to one of them."""
        end = self.spec.rounds if until is None else until
        for i in members:
            stop = self.stops.now.get(i)
            last = end if stop is None else min(end, stop.round)
            if any((i, r) not in self.rows for r in counted(self.spec) if r <= last):
                return False
        return True

    def _train(self, pack: list[int]) -> None:
        with named_write_errors(self.place):
            kept = self._checkpoint(pack)
            begun = 0 if kept is None else kept.round
            stops = self.stops.now
            active = [i for i in pack if i not in stops or stops[i].round > begun]
            if kept is None:
                # Nothing relies on what clients remembered; a crash may have left half of it.
                for i in pack:
                    shutil.rmtree(self._memory(i), ignore_errors=True)
            if active:
                simulation = self._simulation(active, kept)
                facts = read_json(self.place / "manifest.json", None)
                told = rules.gone_on(facts, simulation.trials[0].algorithm, begun, pack[0])
                if told != facts:
                    write_json(self.place / "manifest.json", told)
                self._rounds(pack, active, simulation)

    def _rounds(self, pack: list[int], active: list[int], simulation: Simulation) -> None:
        """The rounds of a pack; ``active`` are the trials of the simulation."""
        self.progress.begin(self.name, self.spec.rounds, simulation.round)
        began = time.monotonic()
        saved, pause = time.monotonic(), self.checkpoint_seconds
        try:
            with DeferredInterrupt(self.progress) as interrupt:
                finished = simulation.round == self.spec.rounds
                while not finished:
                    report = simulation.run_round()
                    self.held.check()
                    records = evaluated(self.spec, simulation, report.records)
                    report = report._replace(records=records)
                    others = (
                        {}
                        if self.reporting is None
                        else by_test(self.spec, simulation, records, self.reporting)
                    )
                    self._write(active, report, others)
                    verdict = self._ask(pack, active, report)
                    self._stop(pack, active, simulation, verdict)
                    self.progress.advance(report)
                    finished = simulation.round == self.spec.rounds or simulation.all_stopped
                    leave = (interrupt.asked or verdict.end) and not finished
                    if leave or (time.monotonic() - saved > pause and not finished):
                        writing = time.monotonic()
                        pack_file.save(self._path, pack, simulation, active)
                        saved = time.monotonic()
                        if pause > 0:
                            pause = max(pause, (saved - writing) / CHECKPOINT_SHARE)
                    # Also after the last round: other packs may follow, which must not begin.
                    if interrupt.asked:
                        raise KeyboardInterrupt
                    if leave:
                        raise TimeLimitReached(simulation.round, self.spec.rounds)
        except KeyboardInterrupt:
            raise Interrupted(simulation.round, self.spec.rounds) from None
        finally:
            self._note(seconds=self._known("seconds", 0.0) + time.monotonic() - began)

    def _ask(self, pack: list[int], active: list[int], report: RoundReport) -> Verdict:
        """Whether there is time left, and which trials are trained no further.

        What was decided before a crash is kept, and takes effect after the same round.
        """
        stop, found = self.spec.stop, dict[int, Stopped]()
        diverged = {active[i]: s for i, s in newly_diverged(report).items()}
        self.lost |= set(diverged)
        # Nothing is gained by stopping after the last round.
        fresh = report.round < self.spec.rounds and not self.stops.revoked.intersection(pack)
        if stop.diverged:
            found |= diverged
        if stop.cannot_win and fresh:
            found |= self.stops.dominated(self.rows, pack, report.round, self.lost) | found
        if report.round in stop.heuristic_halving and fresh:
            found |= self.stops.worse_half(self.rows, report.round) | found
        self.stops.keep(found, [{"seed": t.seed, **t.options} for t in self.trials])
        now = self.stops.now
        due = {i: now[t] for i, t in enumerate(active) if t in now and now[t].round == report.round}
        return Verdict(self.budget.spent, due)

    def _stop(
        self, pack: list[int], active: list[int], simulation: Simulation, verdict: Verdict
    ) -> None:
        if not verdict.stopped:
            return
        simulation.stop(verdict.stopped)
        # Another width may move the last bits on a GPU, so what trains together is written down.
        left = [t for i, t in enumerate(active) if i not in simulation.stopped_trials]
        changes = {(c["pack"], c["round"]): c for c in self._known("pack_changes", [])}
        here = pack[0], simulation.round
        changes[here] = {"pack": here[0], "round": here[1], "trials": left}
        self._note(pack_changes=list(changes.values()))

    def _known(self, fact: str, default: Any) -> Any:
        return read_json(self.place / "manifest.json", None).get(fact, default)

    def _note(self, **facts: Any) -> None:
        """Put something that came to light into the manifest."""
        path = self.place / "manifest.json"
        write_json(path, {**read_json(path, None), **facts})

    @property
    def _path(self) -> Path:
        return self.place / "checkpoint.safetensors"

    def _checkpoint(self, pack: list[int]) -> PackCheckpoint | None:
        """Where a pack stopped; a damaged file is said, and its trials start again."""
        try:
            found = pack_file.load(self._path, pack)
            if found is None:
                return None
            if not self._logged(pack, until=found.round):
                raise Unusable("metrics.jsonl lacks rounds that it has")
            stops = self.stops.now
            wanted = {i for i in pack if i not in stops or stops[i].round > found.round}
            if wanted != set(found.trials):
                raise Unusable("stopped.jsonl tells of other trials than it has")
        except Unusable as error:
            self.progress.say(
                f"{self._path} cannot be used ({error}): {self.name} starts again from round 1"
            )
            return None
        return found

    def _simulation(self, active: list[int], kept: PackCheckpoint | None) -> Simulation:
        spec, facts = self.spec, known_facts(self.place, self.task)
        simulation = Simulation(
            self.task,
            built(spec, self.name, self.task, [self.trials[i] for i in active]),
            rounds=spec.rounds,
            device=resolve_device(spec.device),
            dtype=DTYPES[spec.dtype],
            # Another execution path would move the last bits.
            engine=EnginePlanner(
                EngineChoice(facts["engine"], "as before", facts["onednn"])
                if facts
                else spec.engine,
                chunk=manifest.chunk(facts, self.task, len(active)) if facts else None,
                trainings=sum(spec.packs().values()),
            ),
            precision=spec.precision,
            deterministic=spec.deterministic,
            restored=None if kept is None else [kept.trials[i] for i in active],
            memory_places=[self._memory(i) for i in active],
        )
        if not facts:
            self.place.mkdir(parents=True, exist_ok=True)
            write_json(self.place / "manifest.json", manifest.describe(simulation))
        return simulation

    def _memory(self, trial: int) -> Path:
        return self.place / "memory" / f"trial-{trial}"

    def _write(self, active: list[int], report: RoundReport, others: dict[int, float]) -> None:
        """Add the lines of a round, if it was evaluated."""
        lines = [
            self.trials[trial].line(trial, record, others.get(i))
            for i, (trial, record) in enumerate(zip(active, report.records, strict=True))
            if record.metric is not None
        ]
        if lines:
            self.log.append(lines)
            self.rows |= {(line["trial"], line["round"]): line for line in lines}


def known_facts(place: Path, task: Task) -> dict[str, Any]:
    """The manifest of a search, empty before it began.

    Raises:
        InputError: if it began on other data, or with another model, than the task has.
    """
    path = place / "manifest.json"
    if not path.exists():
        return {}
    facts = read_json(path, None)
    for fact, now in (
        ("data_sha256", task.train.fingerprint()),
        ("task_sha256", task.fingerprint()),
    ):
        # Nobody knows where there is no hash: in manifests of older versions.
        if facts.get(fact, now) != now:
            raise InputError(
                f"{place} was made with other data or another model than {task.name!r} has now: "
                "choose another place with --out"
            )
    return facts
