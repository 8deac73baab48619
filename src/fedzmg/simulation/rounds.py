"""The round: sample -> plan -> train -> merge -> server -> evaluate -> record."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import State, bind, numbers
from fedzmg.data.plan import Entry
from fedzmg.engine.aggregate import Merger, Sums
from fedzmg.engine.choose import EngineChoice, choose
from fedzmg.engine.fit import clients_that_fit, even
from fedzmg.engine.memory import MemoryStore
from fedzmg.engine.round import Broadcast, Engine, Program
from fedzmg.engine.spread import Spread
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized
from fedzmg.errors import InputError
from fedzmg.evaluation import Evaluation, evaluate
from fedzmg.models.initial import initial_params
from fedzmg.models.kernels import onednn, rounding
from fedzmg.models.kernels.determinism import same_bits
from fedzmg.models.kernels.precision import Precision
from fedzmg.simulation import devices
from fedzmg.simulation.accounting import (
    ClientLosses,
    Sizes,
    message_sizes,
    read_records,
    traffic_after,
)
from fedzmg.simulation.clients import ClientMetrics, Watched, measure
from fedzmg.simulation.history import Checkpoint, History, Record
from fedzmg.simulation.planning import Planner
from fedzmg.simulation.trial import Trial, pack
from fedzmg.tasks.task import Task, check
from fedzmg.tree import Tree, named_leaves, refill, row, stack, tree_map

Device = Literal["auto", "cpu", "cuda"]
EngineName = Literal["auto", "sequential", "vectorized", "captured", "compiled"]

DIVERGED_AFTER = 3
"""Rounds in a row that lose every upload before a trial counts as diverged."""


class Snapshot(NamedTuple):
    """Everything a later round depends on, one row per trial (client memory apart)."""

    params: Tree
    state: State
    alive: Tensor
    lost: Tensor
    """Rounds in a row that lost every upload."""
    traffic: Tensor
    """Bytes down and up of all rounds so far."""


class _Launched(NamedTuple):
    """A round that a device has been given, before anything of it has been read back."""

    round: int
    snapshot: Snapshot
    """The state after it."""
    sums: Sums
    scores: Tensor | None
    sizes: list[Sizes]
    losses: Tensor
    """The training loss of every client, one row per trial."""


class RoundReport(NamedTuple):
    """What an observer is shown after every round."""

    round: int
    records: list[Record]
    simulation: Simulation


Observer = Callable[[RoundReport], None]


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
        restored: Sequence[Checkpoint] | None = None,
        memory_places: Sequence[Path] | None = None,
    ) -> None:
        check(task)
        self.task, self.trials, self.rounds = task, list(trials), rounds
        self.device, self.dtype, self.precision = device, dtype, precision
        self.deterministic = deterministic or device.type != "cuda"
        self._memory_places = memory_places
        packed = pack(task, self.trials)
        self.client, self.server = packed.client, packed.server
        self.weights = packed.weights
        model = task.model.to(device, dtype)
        half = torch.bfloat16 if precision == "bf16" and device.type == "cuda" else None
        self._objective = replace(task.objective, model=model, layers_in=half)
        self._program = Program(
            rule=self.client,
            objective=self._objective,
            data=task.train.to(device),
            prepare=task.prepare,
            dtype=dtype,
            device=device,
            longest=task.protocol.batching.steps(int(task.train.counts.max())),
        )
        self._elsewhere = [
            replace(
                self._program,
                objective=replace(self._objective, model=task.model.to(other, dtype)),
                data=task.train.to(other),
                device=other,
            )
            for other in devices.other_devices(device)
        ]
        self._test = type(task.test)(*(column.to(device) for column in task.test))
        self._client_numbers = self._tensors([numbers(t.client) for t in packed.each])
        self._server_numbers = self._tensors([numbers(t.server) for t in packed.each])
        self.snapshot, self.memory = self._begin()
        self.round = 0
        self._planner = Planner(task, [trial.seed for trial in self.trials])
        self._computed, self._useful = 0, 0
        # A GPU works on a round while the host reads the one before. What clients keep is on the
        # host, so a round that reads it has to wait.
        self._runs_ahead = device.type == "cuda" and self.memory.is_empty
        self._next: _Launched | None = None
        self.resting: frozenset[int] = frozenset()
        """Trials that train no further: they have no clients, and keep the model they have."""
        if restored is not None:
            self._restore(restored)
        else:
            for i in range(len(self.trials)):
                self.memory.rewind(i, 0)
        with self._circumstances():
            self.choice = (
                engine
                if isinstance(engine, EngineChoice)
                else choose(engine, self._program, rounds - self.round, self._probe)
            )
            if chunk is None and self.choice.path != "sequential":
                limit = clients_that_fit(self._program, *self._probe())
                share = -(-len(self.trials) * task.protocol.cohort // (1 + len(self._elsewhere)))
                chunk = even(share, limit)
        self.chunk = chunk
        """At most this many clients train at once; None: all of a round."""
        self._engine = self._build()

    def _circumstances(self) -> contextlib.ExitStack:
        """How kernels round, and whether they must give the same bits in every process."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(rounding(self.precision))
            stack.enter_context(same_bits(self.deterministic and self.device.type == "cuda"))
            return stack.pop_all()

    def _build(self) -> Engine:
        """The chosen engine, on every device there is."""
        engines = [
            (program.device, self.choice.build(program, self.chunk))
            for program in (self._program, *self._elsewhere)
        ]
        return Spread(tuple(engines)) if self._elsewhere else engines[0][1]

    def _tensors(self, values: list[dict[str, float]]) -> dict[str, Tensor]:
        """Hyper-parameters as tensors, one row per trial."""
        return {
            path: torch.tensor([v[path] for v in values], dtype=self.dtype, device=self.device)
            for path in values[0]
        }

    def _begin(self) -> tuple[Snapshot, MemoryStore]:
        starts = [
            initial_params(self.task.model, self.task.init, trial.seed).map(
                lambda leaf: leaf.to(self.device, self.dtype)
            )
            for trial in self.trials
        ]
        params = stack(starts)
        state = self._map_server(lambda rule, p: rule.init(p), params)
        flags = torch.zeros(len(self.trials), dtype=torch.int64, device=self.device)
        fresh = self._map_client(lambda rule, p: rule.remember(p), params)
        snapshot = Snapshot(
            params, state, flags == 0, flags, torch.zeros_like(flags)[:, None].repeat(1, 2)
        )
        return snapshot, MemoryStore(fresh, len(self.task.train), self._memory_places)

    def _restore(self, restored: Sequence[Checkpoint]) -> None:
        """Continue from checkpoints of this task and these trials, all at one round."""
        if len({c.round for c in restored}) != 1:
            raise InputError("packed trials can only be resumed from the same round")
        rows = []
        for i, (_, tensors) in enumerate(restored):
            rows.append(_filled(row(self.snapshot, i), tensors, "model"))
            blank = row(self.memory.fresh, i)
            clients = {int(n.split("|")[1]) for n in tensors if n.startswith("memory|")}
            memories = {c: _filled(blank, tensors, f"memory|{c}|") for c in sorted(clients)}
            self.memory.rewind(i, restored[0].round)
            self.memory.put(i, restored[0].round, memories)
        self.snapshot = tree_map(lambda leaf: leaf.to(self.device), stack(rows))
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
        tensors = {f"model{path}": t for path, t in named_leaves(row(self.snapshot, trial)).items()}
        copied = {} if self._memory_places else self.memory.of_trial(trial)
        for client, state in copied.items():
            tensors |= {f"memory|{client}|{p}": t for p, t in named_leaves(state).items()}
        return Checkpoint(self.round, {n: t.detach().cpu().clone() for n, t in tensors.items()})

    def _map_client(self, function: Callable[..., Any], *args: Any) -> Any:
        return _map_rows(self.client, self._client_numbers, function, *args)

    def _map_server(self, function: Callable[..., Any], *args: Any) -> Any:
        return _map_rows(self.server, self._server_numbers, function, *args)

    def _probe(self) -> tuple[list[Entry], Broadcast, State]:
        """One trial's first round: what engines are timed on, whatever the number of trials."""
        entries = [e for e in self._planner.entries(1) if e.trial == 0]
        return entries, self._broadcast(1, self.snapshot), self._read(entries)

    def _broadcast(self, round_: int, now: Snapshot) -> Broadcast:
        shared = self._map_server(lambda rule, s, _: rule.share(s), now.state, now.lost)
        stamp = torch.full((len(self.trials),), round_, dtype=torch.int64, device=self.device)
        return Broadcast(now.params, shared, self._client_numbers, stamp)

    def _read(self, entries: list[Entry]) -> State:
        state = self.memory.read([(e.trial, e.client) for e in entries])
        return tree_map(lambda leaf: leaf.to(self.device), state)

    def run_round(self) -> RoundReport:
        """Train, merge, update and, when due, evaluate; then move to the next round."""
        began = time.perf_counter()
        with onednn(self.choice.onednn), self._circumstances():
            launched = self._next or self._launch(self.round + 1, self.snapshot)
            self._next = None
            if self._runs_ahead and launched.round < self.rounds:
                self._next = self._launch(launched.round + 1, launched.snapshot)
            records = read_records(
                launched.round, launched.snapshot.alive, launched.snapshot.traffic, launched.sums,
                launched.scores, launched.sizes, launched.losses, kept=self.memory.kept_bytes,
                worst=0.0 if self.task.metric.higher_is_better else float("inf"),
            )  # fmt: skip
        self.round, self.snapshot = launched.round, launched.snapshot
        for i in self.resting:
            records[i] = records[i]._replace(loss=None, metric=None)
        seconds = (time.perf_counter() - began) / (len(self.trials) - len(self.resting))
        return RoundReport(self.round, [r._replace(seconds=seconds) for r in records], self)

    def rest(self, trials: Iterable[int]) -> None:
        """Train some trials no further; the others do not notice, but for the width.

        Once all of them rest there is no next round to run.
        """
        before = self.resting
        self.resting |= frozenset(trials)
        if self.resting == before:
            return
        self._next = None  # it was begun with clients that are no more
        if self.device.type == "cuda":
            del self._engine  # and with it the buffers for the wider pack
            torch.cuda.empty_cache()
            self._engine = self._build()

    @property
    def at_rest(self) -> bool:
        """Whether no trial trains any more."""
        return len(self.resting) == len(self.trials)

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
                f"{self.device} has too little memory for {MIN_WIDTH} clients of this task: use a "
                "smaller batch_size or --device cpu"
            ) from None
        self.chunk = max(MIN_WIDTH, -(-now // 2))
        del self._engine  # and with it the buffers that took the room
        torch.cuda.empty_cache()
        self._engine = self._build()

    def _launch_once(self, round_: int, before: Snapshot) -> _Launched:
        entries = [e for e in self._planner.entries(round_) if e.trial not in self.resting]
        sent = self._broadcast(round_, before)
        merger = Merger(entries, [self._weight(e) for e in entries], len(self.trials))
        losses = ClientLosses(entries, len(self.trials))
        uploads: Any = ()
        computed = 0
        remembered: list[tuple[list[tuple[int, int]], State, Tensor]] = []
        for chunk in self._engine.train(entries, sent, self._read(entries)):
            accepted = merger.add(chunk)
            losses.add(chunk, accepted)
            computed += chunk.computed
            uploads = chunk.outcomes.upload
            if not self.memory.is_empty:
                owners = [(entries[i].trial, entries[i].client) for i in chunk.entries]
                kept = tree_map(torch.Tensor.cpu, row(chunk.outcomes.memory, chunk.rows))
                remembered.append((owners, kept, accepted))
        if self.device.type == "cuda":
            # The device is at work on this round: plan the next one meanwhile.
            self._planner.plan_ahead(round_ + 1)
        after = self._update(merger, sent.round, before)
        scores: Tensor | None = None
        if (round_ - 1) % self.task.protocol.eval_every == 0 or round_ == self.rounds:
            scores = self._evaluate(after.params)
            # A loss that is not finite ends the trial.
            after = after._replace(alive=after.alive & scores[:, 0].isfinite())
        sizes = message_sizes(
            entries, sent, uploads,
            cohort=self.task.protocol.cohort, counts=self.weights == "examples",
        )  # fmt: skip
        after = after._replace(traffic=traffic_after(before.traffic, sizes, merger.sums))
        # Nothing of the round is kept before all of it has been computed.
        for owners, kept, accepted in remembered:
            self.memory.write(owners, round_, kept, accepted.tolist())
        self._computed += computed
        self._useful += sum(len(entry.stream) for entry in entries)
        return _Launched(round_, after, merger.sums, scores, sizes, losses.table())

    def _weight(self, entry: Entry) -> float:
        if not len(entry.stream):
            return 0.0
        return float(entry.examples) if self.weights == "examples" else 1.0

    def _update(self, merger: Merger, stamp: Tensor, old: Snapshot) -> Snapshot:
        """Let the servers move; a trial that lost every upload, or is frozen, stays as it is."""
        cohort, sums = merger.cohort(len(self.task.train), stamp), merger.sums
        params, state = self._map_server(
            lambda rule, p, s, c: rule.update(p, s, c), old.params, old.state, cohort
        )
        moves = old.alive & (sums.clients > 0)

        def pick(new: Tensor, before: Tensor) -> Tensor:
            return torch.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, before)

        sent = sums.clients + sums.dropped > 0
        lost = torch.where((sums.clients == 0) & sent, old.lost + 1, torch.zeros_like(old.lost))
        return Snapshot(
            tree_map(pick, params, old.params),
            tree_map(pick, state, old.state),
            old.alive & (lost < DIVERGED_AFTER),
            lost,
            old.traffic,
        )

    def _evaluate(self, params: Tree) -> Tensor:
        """Loss and metric of every trial; zeros for one that rests."""
        found = evaluate(
            row(params, self._awake) if self.resting else params,
            self._test,
            self._objective,
            self.task.metric,
            self.task.prepare,
        )
        return self._with_resting(found, 0.0)

    @property
    def _awake(self) -> list[int]:
        return [i for i in range(len(self.trials)) if i not in self.resting]

    def _with_resting(self, rows: Tensor, value: float) -> Tensor:
        """Rows of the trials that train, filled up with a value for those that do not."""
        if not self.resting:
            return rows
        whole = rows.new_full((len(self.trials), rows.shape[1]), value)
        whole[self._awake] = rows
        return whole

    def padding(self) -> float:
        """Client steps computed so far over those that clients had: 1.0 wastes nothing."""
        return self._computed / max(self._useful, 1)

    def step_seconds(self) -> float | None:
        """What a GPU spent on local steps since this was last asked; None: it is not known."""
        return self._engine.step_seconds() if isinstance(self._engine, Vectorized) else None

    def evaluate(self) -> list[Evaluation]:
        """Loss and metric of every trial's model on the test examples."""
        with self._circumstances():
            return [Evaluation(*pair) for pair in self._evaluate(self.snapshot.params).tolist()]

    @functools.cached_property
    def _watched(self) -> Watched:
        return Watched.of(self.task)

    def evaluate_clients(self) -> list[ClientMetrics]:
        """How every trial's model does on each client's own examples; see :class:`Watched`."""
        watched = self._watched
        data = self._test if watched.part == "test" else self._program.data.examples
        with onednn(self.choice.onednn), rounding(self.precision):
            return measure(
                self.task, watched, self.snapshot.params, data, self._objective, self.round
            )


def _map_rows(
    rule: Any, values: dict[str, Tensor], function: Callable[..., Any], *args: Any
) -> Any:
    """Map ``function(rule, *args)`` over trials, the rule bound to each trial's numbers."""
    with torch.no_grad():
        return torch.vmap(lambda n, *a: function(bind(rule, n), *a))(values, *args)


def _filled(template: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """The template with a checkpoint's tensors; a misfit is an input error, not a crash."""
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name, leaf in named_leaves(template).items():
        other = found.get(name)
        if other is None or other.shape != leaf.shape or other.dtype != leaf.dtype:
            raise InputError(
                f"the checkpoint does not fit this run ({prefix}{name} is missing or has another "
                "shape): it was made with other settings; choose another directory"
            )
    return refill(template, found)


def simulate(
    task: Task,
    trials: Sequence[Trial] | Trial,
    *,
    rounds: int | None = None,
    engine: EngineName = "auto",
    device: Device = "auto",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "float32",
    deterministic: bool = False,
    chunk: int | None = None,
    observer: Observer | None = None,
) -> list[History]:
    """Train trials of equal structure together; one history each.

    Args:
        task: a preset of ``fedzmg.tasks`` or :meth:`Task.from_arrays`.
        trials: algorithms that differ only in numbers, and seeds.
        rounds: instead of the task's own number of rounds.
        engine: ``auto`` measures and picks; ``sequential`` is the reference loop, ``vectorized``
            maps over clients, ``compiled`` also compiles the step.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: type of parameters and updates.
        precision: how layers are computed on a GPU: ``float32``, ``tf32`` or ``bf16``.
        deterministic: on a GPU, the same bits whenever the same trials are packed together;
            slower. Processors always give the same bits.
        chunk: train at most this many clients at once, to save memory.
        observer: called after every round.

    Raises:
        InputError: for trials of different structure or a task that does not fit together.
    """
    trials = [trials] if isinstance(trials, Trial) else trials
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk = {chunk!r}: expected a whole number of at least 1")
    total = task.protocol.rounds if rounds is None else rounds
    protocol = replace(task.protocol, rounds=total)
    simulation = Simulation(
        replace(task, protocol=protocol),
        trials,
        rounds=total,
        device=devices.resolve_device(device),
        dtype=dtype,
        engine=engine,
        precision=precision,
        deterministic=deterministic,
        chunk=chunk,
    )
    records: list[list[Record]] = [[] for _ in trials]
    while simulation.round < total:
        report = simulation.run_round()
        for kept, record in zip(records, report.records, strict=True):
            kept.append(record)
        if observer is not None:
            observer(report)
    return simulation.histories(records)
