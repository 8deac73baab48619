"""The round: sample -> plan -> train -> merge -> server -> evaluate -> record.

:func:`simulate` trains a list of *trials* (algorithm, seed) of equal structure side by side on
one client axis and returns one history each. A trial's history does not depend on its neighbours.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedzmg import algorithms
from fedzmg.algorithms.options import configure
from fedzmg.contract import Algorithm, State, bind, numbers, structure
from fedzmg.data.plan import Entry, local_stream, sample_cohort
from fedzmg.engine.aggregate import Merger, Sums
from fedzmg.engine.choose import EngineChoice, choose
from fedzmg.engine.fit import clients_that_fit, even
from fedzmg.engine.ledger import EXAMPLE_COUNT, Message, weigh
from fedzmg.engine.memory import MemoryStore
from fedzmg.engine.round import Broadcast, Engine, Program
from fedzmg.engine.spread import Spread
from fedzmg.engine.vectorized import MIN_WIDTH
from fedzmg.errors import InputError, unknown
from fedzmg.evaluation import Evaluation, evaluate
from fedzmg.models.initial import initial_params
from fedzmg.models.kernels import onednn, rounding
from fedzmg.models.kernels.precision import Precision
from fedzmg.tasks.task import Task, check
from fedzmg.tree import Tree, named_leaves, refill, row, stack, tree_map

Device = Literal["auto", "cpu", "cuda"]
EngineName = Literal["auto", "sequential", "vectorized", "captured", "compiled"]

_planner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plan")
"""Plans rounds ahead while a GPU is at work."""

DIVERGED_AFTER = 3
"""Rounds in a row that lose every upload before a trial counts as diverged."""


@dataclass(frozen=True)
class Trial:
    """One training to be simulated: an algorithm with its hyper-parameters, and a seed."""

    algorithm: Algorithm
    seed: int = 0

    @classmethod
    def of(cls, name: str, seed: int = 0, task: Task | None = None, **options: Any) -> Trial:
        """A trial by algorithm name.

        Args:
            name: a key of ``fedzmg.algorithms.ALGORITHMS``.
            seed: controls initial weights, cohorts, batch order and dropout.
            task: take the hyper-parameters that this task recommends for the algorithm.
            **options: changed fields, with ``_`` after the side: ``client_lr=0.03``.
        """
        wanted = {} if task is None else dict(task.options.get(name, {}))
        wanted |= {k.replace("_", ".", 1): v for k, v in options.items()}
        return cls(configure(algorithms.get(name), wanted), seed)


class Record(NamedTuple):
    """What one trial's round came to; ``round`` counts from 1."""

    round: int
    clients: int
    dropped: int
    """Uploads refused because they were not finite."""
    steps: int
    train_loss: float
    bytes_down: int
    """Arrays sent to the cohort in this round."""
    bytes_up: int
    """Arrays received from it."""
    bytes_up_bound: int
    """The same, if whole numbers used no more bits than they need."""
    scalar_bytes_down: int
    scalar_bytes_up: int
    """Steps, rounds, losses, rates and example counts, apart from the arrays."""
    bytes_kept: int
    """What each client that took part keeps until it is sampled again."""
    total_bytes_down: int
    """Arrays and scalars of all rounds so far."""
    total_bytes_up: int
    seconds: float
    loss: float | None = None
    """Evaluation loss; None in rounds without evaluation."""
    metric: float | None = None
    diverged: bool = False


class Snapshot(NamedTuple):
    """Everything a later round depends on, one row per trial (client memory apart)."""

    params: Tree
    state: State
    alive: Tensor
    lost: Tensor
    """Rounds in a row that lost every upload."""
    traffic: Tensor
    """Bytes down and up of all rounds so far."""


@dataclass(frozen=True)
class History:
    """One trial's curve and its trained model."""

    task: Task
    trial: Trial
    records: tuple[Record, ...]
    params: Tree

    @property
    def diverged(self) -> int | None:
        """The round in which the trial diverged, if it did."""
        return next((r.round for r in self.records if r.diverged), None)

    @property
    def rounds(self) -> list[int]:
        """Evaluated rounds, counted from 1."""
        return [r.round for r in self.records if r.metric is not None]

    @property
    def metrics(self) -> list[float]:
        """The metric after each evaluated round."""
        return [r.metric for r in self.records if r.metric is not None]

    def model(self) -> nn.Module:
        """The trained model: a copy of the task's module with these parameters, in eval mode."""
        module = copy.deepcopy(self.task.model.source)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.params.items():
                named[name].copy_(value)
        return module.eval()


class Checkpoint(NamedTuple):
    """One trial's position: everything a later round depends on, as named tensors."""

    round: int
    tensors: dict[str, Tensor]

    def params(self) -> Tree:
        """The global model at this position."""
        prefix, suffix = "model.params['", "']"
        return Tree(
            {
                name.removeprefix(prefix).removesuffix(suffix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
        )


class RoundReport(NamedTuple):
    """What an observer is shown after every round."""

    round: int
    records: list[Record]
    simulation: Simulation


Observer = Callable[[RoundReport], None]


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    return torch.cuda.is_available()


def other_devices(device: torch.device) -> list[torch.device]:
    """The other GPUs that work is spread over; CUDA_VISIBLE_DEVICES limits them."""
    if device.type != "cuda":
        return []
    first = device.index or 0
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != first]


def resolve_device(device: str) -> torch.device:
    """The device that ``auto`` stands for, or the named one.

    Raises:
        InputError: for an unknown name or a device this machine does not have.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ["auto", "cpu", "cuda"])
    if device == "cuda" and not has_gpu():
        raise InputError("device 'cuda': no CUDA device is available here; use --device cpu")
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    return torch.device(device)


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
        chunk: int | None = None,
        restored: Sequence[Checkpoint] | None = None,
        memory_places: Sequence[Path] | None = None,
    ) -> None:
        check(task)
        self.task, self.trials, self.rounds = task, list(trials), rounds
        self.device, self.dtype, self.precision = device, dtype, precision
        self._memory_places = memory_places
        packed = _pack(task, self.trials)
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
            for other in other_devices(device)
        ]
        self._test = type(task.test)(*(column.to(device) for column in task.test))
        self._client_numbers = self._tensors([numbers(t.client) for t in packed.each])
        self._server_numbers = self._tensors([numbers(t.server) for t in packed.each])
        self.snapshot, self.memory = self._begin()
        self.round = 0
        self._ahead: tuple[int, Future[list[Entry]]] | None = None
        self._computed, self._useful = 0, 0
        if restored is not None:
            self._restore(restored)
        else:
            for i in range(len(self.trials)):
                self.memory.rewind(i, 0)
        with rounding(precision):
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

    def _planned(self, round_: int) -> list[Entry]:
        if self._ahead is not None and self._ahead[0] == round_:
            return self._ahead[1].result()
        return self._entries(round_)

    def _entries(self, round_: int) -> list[Entry]:
        """Cohort and batch plan of every trial, trials one after another."""
        planned = {seed: self._plan(seed, round_) for seed in {t.seed for t in self.trials}}
        return [
            entry._replace(trial=i)
            for i, trial in enumerate(self.trials)
            for entry in planned[trial.seed]
        ]

    def _plan(self, seed: int, round_: int) -> list[Entry]:
        """Cohort and batches under one seed, which all of its trials share."""
        protocol, data = self.task.protocol, self.task.train
        cohort = sample_cohort(
            seed, round_, len(data), protocol.cohort, replacement=protocol.replacement
        ).tolist()
        drawn: Counter[int] = Counter()
        entries = []
        for client in cohort:
            first, last = (int(o) for o in data.offsets[client : client + 2])
            place = (seed, round_, client, drawn[client])
            stream = local_stream(protocol.batching, *place, first, last - first)
            entries.append(Entry(0, client, last - first, stream))
            drawn[client] += 1
        return entries

    def _probe(self) -> tuple[list[Entry], Broadcast, State]:
        """One trial's first round: what engines are timed on, whatever the number of trials."""
        entries = [e for e in self._entries(1) if e.trial == 0]
        return entries, self._broadcast(1), self._read(entries)

    def _broadcast(self, round_: int) -> Broadcast:
        shared = self._map_server(
            lambda rule, s, _: rule.share(s), self.snapshot.state, self.snapshot.lost
        )
        stamp = torch.full((len(self.trials),), round_, dtype=torch.int64, device=self.device)
        return Broadcast(self.snapshot.params, shared, self._client_numbers, stamp)

    def _read(self, entries: list[Entry]) -> State:
        state = self.memory.read([(e.trial, e.client) for e in entries])
        return tree_map(lambda leaf: leaf.to(self.device), state)

    def run_round(self) -> RoundReport:
        """Train, merge, update and, when due, evaluate; then move to the next round."""
        with onednn(self.choice.onednn), rounding(self.precision):
            while True:
                try:
                    return self._run_round()
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

    def _run_round(self) -> RoundReport:
        began = time.perf_counter()
        round_ = self.round + 1
        entries = self._planned(round_)
        sent = self._broadcast(round_)
        merger = Merger(entries, [self._weight(e) for e in entries], len(self.trials))
        uploads: Any = ()
        remembered: list[tuple[list[tuple[int, int]], State, Tensor]] = []
        for chunk in self._engine.train(entries, sent, self._read(entries)):
            accepted = merger.add(chunk)
            self._computed += chunk.computed
            uploads = chunk.outcomes.upload
            if not self.memory.is_empty:
                owners = [(entries[i].trial, entries[i].client) for i in chunk.entries]
                kept = tree_map(torch.Tensor.cpu, row(chunk.outcomes.memory, chunk.rows))
                remembered.append((owners, kept, accepted))
        if self.device.type == "cuda":
            # The device is at work on this round: plan the next one meanwhile.
            self._ahead = round_ + 1, _planner.submit(self._entries, round_ + 1)
        self._useful += sum(len(entry.stream) for entry in entries)
        # Nothing of the round is kept before all of it has been computed.
        for owners, kept, accepted in remembered:
            self.memory.write(owners, round_, kept, accepted.tolist())
        self._update(merger, sent.round)
        due = (round_ - 1) % self.task.protocol.eval_every == 0 or round_ == self.rounds
        scores = self._score() if due else None
        records = self._records(round_, merger.sums, scores, self._sizes(entries, sent, uploads))
        seconds = (time.perf_counter() - began) / len(self.trials)
        self.round = round_
        return RoundReport(round_, [r._replace(seconds=seconds) for r in records], self)

    def _sizes(
        self, entries: list[Entry], sent: Broadcast, uploads: Any
    ) -> list[tuple[Message, Message]]:
        """Size of every trial's messages: down to the cohort, and up from one client."""
        longest = [0] * len(self.trials)
        for entry in entries:
            longest[entry.trial] = max(longest[entry.trial], len(entry.stream))
        cohort = self.task.protocol.cohort
        count = EXAMPLE_COUNT if self.weights == "examples" else 0
        found: dict[int, tuple[Message, Message]] = {}
        for steps in set(longest):
            up = weigh(uploads, steps)
            down = weigh((sent.params, sent.shared), steps).times(cohort)
            found[steps] = down, up._replace(scalars=up.scalars + count)
        return [found[steps] for steps in longest]

    def _score(self) -> Tensor:
        """Loss and metric of every trial; a loss that is not finite ends the trial."""
        scores = self._evaluate()
        alive = self.snapshot.alive & scores[:, 0].isfinite()
        self.snapshot = self.snapshot._replace(alive=alive)
        return scores

    def _weight(self, entry: Entry) -> float:
        if not len(entry.stream):
            return 0.0
        return float(entry.examples) if self.weights == "examples" else 1.0

    def _update(self, merger: Merger, stamp: Tensor) -> None:
        """Let the servers move; a trial that lost every upload, or is frozen, stays as it is."""
        old = self.snapshot
        cohort, sums = merger.cohort(len(self.task.train), stamp), merger.sums
        params, state = self._map_server(
            lambda rule, p, s, c: rule.update(p, s, c), old.params, old.state, cohort
        )
        moves = old.alive & (sums.clients > 0)

        def pick(new: Tensor, before: Tensor) -> Tensor:
            return torch.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, before)

        sent = sums.clients + sums.dropped > 0
        lost = torch.where((sums.clients == 0) & sent, old.lost + 1, torch.zeros_like(old.lost))
        self.snapshot = Snapshot(
            tree_map(pick, params, old.params),
            tree_map(pick, state, old.state),
            old.alive & (lost < DIVERGED_AFTER),
            lost,
            old.traffic,
        )

    def _records(
        self,
        round_: int,
        sums: Sums,
        scores: Tensor | None,
        sizes: list[tuple[Message, Message]],
    ) -> list[Record]:
        # One transfer for everything: each would wait for the device anew.
        columns = [self.snapshot.alive, sums.clients, sums.dropped, sums.steps, sums.loss]
        columns += [*self.snapshot.traffic.T, *([] if scores is None else scores.T)]
        read = torch.stack([column.double() for column in columns], 1).tolist()
        worst = 0.0 if self.task.metric.higher_is_better else float("inf")
        records, totals = [], []
        for (down, one_up), values in zip(sizes, read, strict=True):
            alive, loss, score = bool(values[0]), values[4], values[7:]
            clients, dropped, steps, before_down, before_up = (
                int(values[i]) for i in (1, 2, 3, 5, 6)
            )
            up = one_up.times(clients + dropped)
            total = before_down + down.arrays + down.scalars, before_up + up.arrays + up.scalars
            totals.append(total)
            records.append(
                Record(
                    round=round_,
                    clients=clients,
                    dropped=dropped,
                    steps=steps,
                    train_loss=loss / clients if clients else float("nan"),
                    bytes_down=down.arrays,
                    bytes_up=up.arrays,
                    bytes_up_bound=up.bound,
                    scalar_bytes_down=down.scalars,
                    scalar_bytes_up=up.scalars,
                    bytes_kept=self.memory.kept_bytes,
                    total_bytes_down=total[0],
                    total_bytes_up=total[1],
                    seconds=0.0,
                    loss=score[0] if score else None,
                    metric=(score[1] if alive else worst) if score else None,
                    diverged=not alive,
                )
            )
        self.snapshot = self.snapshot._replace(traffic=torch.tensor(totals).to(self.device))
        return records

    def _evaluate(self) -> Tensor:
        return evaluate(
            self.snapshot.params,
            self._test,
            self._objective,
            self.task.metric,
            self.task.prepare,
        )

    def padding(self) -> float:
        """Client steps computed so far over those that clients had: 1.0 wastes nothing."""
        return self._computed / max(self._useful, 1)

    def evaluate(self) -> list[Evaluation]:
        """Loss and metric of every trial's model on the test examples."""
        with rounding(self.precision):
            return [Evaluation(*pair) for pair in self._evaluate().tolist()]


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


class _Pack(NamedTuple):
    each: list[Algorithm]
    client: Any
    server: Any
    weights: str


def _pack(task: Task, trials: list[Trial]) -> _Pack:
    """Check that trials have equal structure, and give the rules that all of them share."""
    if not trials:
        raise InputError("no trial to simulate: give at least one")
    fitted = [trial.algorithm.for_layout(task.model.layout) for trial in trials]
    shapes = [(structure(a.client), structure(a.server), a.weights) for a in fitted]
    for trial, shape in zip(trials, shapes, strict=True):
        if shape != shapes[0]:
            raise InputError(
                f"trials of {trials[0].algorithm.name} and {trial.algorithm.name} differ in more "
                "than numbers: simulate them in separate calls"
            )
    return _Pack(fitted, *shapes[0])


def simulate(
    task: Task,
    trials: Sequence[Trial] | Trial,
    *,
    rounds: int | None = None,
    engine: EngineName = "auto",
    device: Device = "auto",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "float32",
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
        device=resolve_device(device),
        dtype=dtype,
        engine=engine,
        precision=precision,
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
