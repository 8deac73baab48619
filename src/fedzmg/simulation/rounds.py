"""The round: sample -> plan -> train -> merge -> server -> evaluate -> record."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import State
from fedzmg.data.federated import Examples
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.choose import EngineChoice, PathName, choose
from fedzmg.engine.memory import MemoryStore
from fedzmg.engine.memory_limit import clients_that_fit, even
from fedzmg.engine.round import Broadcast, Engine
from fedzmg.engine.spread import Spread
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized
from fedzmg.errors import InputError
from fedzmg.evaluation import Evaluation, evaluate
from fedzmg.models.kernels import onednn, rounding
from fedzmg.models.kernels.determinism import same_bits
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation.checkpoint import checkpoint_of, restored_snapshot
from fedzmg.simulation.clients import ClientMetrics, Watched, measure
from fedzmg.simulation.dry_run import rehearse
from fedzmg.simulation.history import Checkpoint, History, Record
from fedzmg.simulation.packed_rule import PackedRule
from fedzmg.simulation.placement import place
from fedzmg.simulation.planning import Planner
from fedzmg.simulation.records import (
    Facts,
    message_sizes,
    read_records,
    send_facts,
    traffic_after,
)
from fedzmg.simulation.snapshot import Snapshot, first_models, first_snapshot, next_snapshot
from fedzmg.simulation.trial import Trial, pack
from fedzmg.simulation.uploads import receive
from fedzmg.tasks.fit import check
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, row, tree_map

EngineName = Literal["auto", PathName]


class _Launched(NamedTuple):
    """A round that a device has been given, before anything of it has been read back."""

    round: int
    snapshot: Snapshot
    """The state after it."""
    facts: Facts


class RoundReport(NamedTuple):
    """What an observer is shown after every round."""

    round: int
    records: list[Record]
    simulation: Simulation


class Simulation:
    """A pack of trials in progress; :meth:`run_round` moves all of them by one round."""

    def __init__(
        self,
        task: Task,
        trials: Sequence[Trial],
        *,
        rounds: int,
        device: torch.device,
        dtype: torch.dtype,
        engine: EngineName | EngineChoice,
        precision: Precision = "float32",
        deterministic: bool = False,
        chunk: int | None = None,
        trainings: int = 1,
        restored: Sequence[Checkpoint] | None = None,
        memory_places: Sequence[Path] | None = None,
    ) -> None:
        check(task)
        self.task, self.trials, self.rounds = task, list(trials), rounds
        self.device, self.dtype, self.precision = device, dtype, precision
        self.deterministic = deterministic or device.type != "cuda"
        self._memory_places = memory_places
        packed = pack(task, self.trials)
        self.weights = packed.weights
        self._program, self._elsewhere, self._test = place(
            task, packed.client, device, dtype, precision
        )
        self._clients = PackedRule.of(packed.client, [t.client for t in packed.each], dtype, device)
        self._servers = PackedRule.of(packed.server, [t.server for t in packed.each], dtype, device)
        self.snapshot, self.memory = self._begin()
        self.round = 0
        self._planner = Planner(task, [trial.seed for trial in self.trials])
        self._computed, self._useful = 0, 0
        # A GPU works on a round while the host reads the one before. What clients keep is on the
        # host, so a round that reads it has to wait.
        self._runs_ahead = device.type == "cuda" and self.memory.is_empty
        self._next: _Launched | None = None
        self.stopped_trials: frozenset[int] = frozenset()
        """Trials that train no further: they have no clients, and keep the model they have."""
        if restored is not None:
            self._restore(restored)
        else:
            for i in range(len(self.trials)):
                self.memory.rewind(i, 0)
        with self._rounding():
            self.choice = (
                engine
                if isinstance(engine, EngineChoice)
                else choose(
                    engine,
                    self._program,
                    rounds - self.round,
                    self._probe,
                    trials=len(self.trials),
                    trainings=trainings,
                )
            )
            if chunk is None and self.choice.path != "sequential":
                limit = clients_that_fit(self._program, *self._probe())
                share = -(-len(self.trials) * task.protocol.cohort // (1 + len(self._elsewhere)))
                chunk = even(share, limit)
        self.chunk = chunk
        """At most this many clients train at once; None: all of a round."""
        self._models = len(self.trials)
        """At most this many models are evaluated at once."""
        self._engine = self._build()

    @contextlib.contextmanager
    def _rounding(self) -> Iterator[None]:
        """How kernels round, and whether they must give the same bits in every process."""
        with (
            rounding(self.precision),
            same_bits(self.deterministic and self.device.type == "cuda"),
        ):
            yield

    @contextlib.contextmanager
    def _numerics(self) -> Iterator[None]:
        """All that decides the last bits, now that there is a choice: of every number reported."""
        with onednn(self.choice.onednn), self._rounding():
            yield

    def _build(self) -> Engine:
        """The chosen engine, on every device there is."""
        engines = [
            (program.device, self.choice.build(program, self.chunk))
            for program in (self._program, *self._elsewhere)
        ]
        return Spread(tuple(engines)) if self._elsewhere else engines[0][1]

    def _begin(self) -> tuple[Snapshot, MemoryStore]:
        seeds = [trial.seed for trial in self.trials]
        params = first_models(self.task, seeds, self.dtype, self.device)
        rehearse(self._clients, self._servers, params)
        snapshot = first_snapshot(self._servers, params, len(seeds), self.device)
        fresh = self._clients.map(lambda rule, p: rule.init_memory(p), params)
        return snapshot, MemoryStore(fresh, len(self.task.train), self._memory_places)

    def _restore(self, restored: Sequence[Checkpoint]) -> None:
        """Continue from checkpoints of this task and these trials, all at one round."""
        found = restored_snapshot(restored, self.snapshot, self.memory)
        self.snapshot = tree_map(lambda leaf: leaf.to(self.device), found)
        self.round = restored[0].round

    def histories(self, records: Sequence[Sequence[Record]]) -> list[History]:
        """The trials' curves, given as records, with their models as they are now."""
        return [
            History(self.task, trial, tuple(records[i]), row(self.snapshot.params, i))
            for i, trial in enumerate(self.trials)
        ]

    def checkpoint(self, trial: int) -> Checkpoint:
        """One trial's position after the last finished round.

        Client memory is copied into it, unless it lives in files that outlive the process.
        """
        copied = {} if self._memory_places else self.memory.of_trial(trial)
        return checkpoint_of(self.round, self.snapshot, trial, copied)

    def _probe(self) -> tuple[list[ClientBatch], Broadcast, State]:
        """One trial's first round: what engines are timed on, whatever the number of trials."""
        entries = [e for e in self._planner.entries(1) if e.trial == 0]
        return entries, self._broadcast(1, self.snapshot), self._read(entries)

    def _broadcast(self, round_: int, now: Snapshot) -> Broadcast:
        shared = self._servers.map(lambda rule, s, _: rule.share(s), now.state, now.lost)
        stamp = torch.full((len(self.trials),), round_, dtype=torch.int64, device=self.device)
        return Broadcast(now.params, shared, self._clients.numbers, stamp)

    def _read(self, entries: list[ClientBatch]) -> State:
        state = self.memory.read([(e.trial, e.client) for e in entries])
        return tree_map(lambda leaf: leaf.to(self.device), state)

    def run_round(self) -> RoundReport:
        """Train, merge, update and, when due, evaluate; then move to the next round."""
        began = time.perf_counter()
        with self._numerics():
            launched = self._next or self._launch(self.round + 1, self.snapshot)
            self._next = None
            if self._runs_ahead and launched.round < self.rounds:
                self._next = self._launch(launched.round + 1, launched.snapshot)
            records = read_records(
                launched.round,
                launched.facts,
                kept=self.memory.kept_bytes,
                worst=self.task.metric.worst,
            )
        self.round, self.snapshot = launched.round, launched.snapshot
        for i in self.stopped_trials:
            records[i] = records[i]._replace(loss=None, metric=None)
        # At once or never: a training of hours is not to end by a value near zero.
        for record in records if self.round == 1 else ():
            self.task.metric.check_value(record.metric)
        seconds = (time.perf_counter() - began) / (len(self.trials) - len(self.stopped_trials))
        return RoundReport(self.round, [r._replace(seconds=seconds) for r in records], self)

    def stop(self, trials: Iterable[int]) -> None:
        """Train some trials no further; the others do not notice, but for the width.

        Once all of them rest there is no next round to run.
        """
        before = self.stopped_trials
        self.stopped_trials |= frozenset(trials)
        if self.stopped_trials == before:
            return
        self._next = None  # it was begun with clients that are no more
        if self.deterministic and self.device.type == "cuda":
            self._rebuild()  # every width has buffers of its own then

    @property
    def all_stopped(self) -> bool:
        """Whether no trial trains any more."""
        return len(self.stopped_trials) == len(self.trials)

    def _launch(self, round_: int, before: Snapshot) -> _Launched:
        """Give a round to the device; what does not fit is tried again in smaller parts."""
        while True:
            try:
                return self._launch_once(round_, before)
            except torch.OutOfMemoryError:
                self._halve()

    def _halve(self) -> None:
        """Train fewer clients at once; nothing of the round that did not fit has been kept."""
        now = self.chunk or len(self.trials) * self.task.protocol.cohort
        if now <= MIN_WIDTH:
            raise InputError(
                f"{self.device} has too little memory for {MIN_WIDTH} clients and "
                f"{len(self.trials)} models of this task: train fewer runs at once, or use a "
                "smaller batch_size or --device cpu"
            ) from None
        self.chunk = max(MIN_WIDTH, -(-now // 2))
        self._rebuild()

    def _rebuild(self) -> None:
        """A new engine, without the buffers of the old one."""
        del self._engine
        torch.cuda.empty_cache()
        self._engine = self._build()

    def _launch_once(self, round_: int, before: Snapshot) -> _Launched:
        entries = [e for e in self._planner.entries(round_) if e.trial not in self.stopped_trials]
        sent = self._broadcast(round_, before)
        received = receive(
            self._engine.train(entries, sent, self._read(entries)),
            entries,
            len(self.trials),
            by_examples=self.weights == "examples",
            keeps_memory=not self.memory.is_empty,
        )
        if self.device.type == "cuda":
            # The device is at work on this round: plan the next one meanwhile.
            self._planner.plan_ahead(round_ + 1)
        sums = received.merger.sums
        after = next_snapshot(
            self._servers, received.merger, len(self.task.train), sent.round, before
        )
        scores: Tensor | None = None
        if (round_ - 1) % self.task.protocol.eval_every == 0 or round_ == self.rounds:
            scores = self._evaluate(after.params)
            # A loss that is not finite ends the trial.
            after = after._replace(alive=after.alive & scores[:, 0].isfinite())
        sizes = message_sizes(
            entries, sent, received.sample,
            cohort=self.task.protocol.cohort, counts=self.weights == "examples",
        )  # fmt: skip
        after = after._replace(traffic=traffic_after(before.traffic, sizes, sums))
        facts = send_facts(after.alive, after.traffic, sums, scores, sizes, received.losses.table())
        # Nothing of the round is kept before all of it has been computed.
        for owners, kept, accepted in received.remembered:
            self.memory.write(owners, round_, kept, accepted.tolist())
        self._computed += received.computed
        self._useful += sum(len(entry.stream) for entry in entries)
        return _Launched(round_, after, facts)

    def _evaluate(self, params: Tree, examples: Examples | None = None) -> Tensor:
        """Loss and metric of every trial; zeros for one that rests."""
        awake = [i for i in range(len(self.trials)) if i not in self.stopped_trials]
        chosen = row(params, awake) if self.stopped_trials else params
        test = self._test if examples is None else examples
        while True:
            try:
                parts = [
                    evaluate(
                        row(chosen, slice(first, first + self._models)),
                        test,
                        self._program.objective,
                        self.task.metric,
                        self.task.prepare,
                    )
                    for first in range(0, len(awake), self._models)
                ]
                break
            except torch.OutOfMemoryError:
                if self._models <= MIN_WIDTH:
                    raise
                self._models = max(MIN_WIDTH, -(-self._models // 2))
                torch.cuda.empty_cache()
        found = torch.cat(parts)
        if not self.stopped_trials:
            return found
        whole = found.new_zeros((len(self.trials), found.shape[1]))
        whole[awake] = found
        return whole

    def padding(self) -> float:
        """Client steps computed so far over those that clients had: 1.0 wastes nothing."""
        return self._computed / max(self._useful, 1)

    def step_seconds(self) -> float | None:
        """What a GPU spent on local steps since this was last asked; None: it is not known."""
        return self._engine.step_seconds() if isinstance(self._engine, Vectorized) else None

    def evaluate(self, examples: Examples | None = None) -> list[Evaluation]:
        """Loss and metric of every trial's model on the test examples, or on others."""
        if examples is not None:
            examples = Examples(*(column.to(self.device) for column in examples))
        with self._numerics():
            found = self._evaluate(self.snapshot.params, examples)
        evaluations = [Evaluation(*pair) for pair in found.tolist()]
        for evaluation in evaluations if self.round <= 1 else ():
            self.task.metric.check_value(evaluation.metric)
        return evaluations

    @functools.cached_property
    def _watched(self) -> Watched:
        return Watched.of(self.task)

    def evaluate_clients(self) -> list[ClientMetrics]:
        """How every trial's model does on each client's own examples; see :class:`Watched`."""
        watched = self._watched
        data = self._test if watched.part == "test" else self._program.data.examples
        with self._numerics():
            return measure(
                self.task, watched, self.snapshot.params, data, self._program.objective, self.round
            )
