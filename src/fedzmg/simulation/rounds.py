"""The round of a pack of trials: plan -> train -> merge -> server -> evaluate -> record."""

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EngineChoice, EngineName, EnginePlanner
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.engine.local import Broadcast
from fedzmg.engine.probe import Probe
from fedzmg.engine.replay import Replayed
from fedzmg.engine.sequential import Sequential
from fedzmg.engine.vectorized import MIN_WIDTH, Vectorized
from fedzmg.errors import noted
from fedzmg.evaluation import Evaluation, evaluate
from fedzmg.federation import Federation
from fedzmg.kernels import channels_last, onednn, rounding, threads
from fedzmg.kernels.precision import DEFAULT_PRECISION, Precision, same_bits, timer
from fedzmg.models.initial import initial_params
from fedzmg.simulation.closing import Closing
from fedzmg.simulation.dry_run import dry_run
from fedzmg.simulation.history import History, Record, Watched, measure
from fedzmg.simulation.host_memory import keep_freed_memory
from fedzmg.simulation.personal import own_metrics
from fedzmg.simulation.planner import RoundPlanner
from fedzmg.simulation.program import build_program
from fedzmg.simulation.records import RoundFacts
from fedzmg.simulation.server import Checkpoint, ServerSide, Snapshot, restored_snapshot
from fedzmg.simulation.shards import Memories, ShardedMemory, Shards, merge_chunks, merge_shards
from fedzmg.simulation.trial import Trial, packed_rules
from fedzmg.storage.client_metrics import ClientMetrics
from fedzmg.tasks.task import Task
from fedzmg.tree import State, Tree, leaves, row, stack, tree_map

PROBED_ROUNDS = 100  # rounds that are searched for one with clients
FEW_MODELS = 8  # with so few, launching an evaluation takes longer than computing it


class _Launched(NamedTuple):
    """A round that was queued on the device, before any of it has been read back."""

    round: int
    snapshot: Snapshot  # the state after it
    facts: RoundFacts


class RoundReport(NamedTuple):
    """Argument of an observer after every round."""

    round: int
    records: list[Record]
    simulation: "Simulation"


class Simulation:
    """A pack of trials in progress; :meth:`run_round` moves all of them by one round.

    The arguments are those of :func:`fedzmg.simulation.simulate`, and four more: ``restored``
    has a checkpoint per trial to continue from, ``memory_places`` a directory per trial for lasting
    client memory, ``planner`` plans cohorts and batches, and ``shards`` trains parts of cohorts.
    """

    def __init__(
        self, task: Task, trials: Sequence[Trial], *, rounds: int, device: torch.device,
        dtype: torch.dtype, engine: EngineName | EngineChoice | EnginePlanner,
        precision: Precision = DEFAULT_PRECISION, deterministic: bool = False,
        federation: Federation | None = None, restored: Sequence[Checkpoint] | None = None,
        memory_places: Sequence[Path] | None = None, planner: RoundPlanner | None = None,
        shards: Shards | None = None,
    ) -> None:  # fmt: skip
        task.check()
        if device.type == "cpu":
            keep_freed_memory()
        self.task, self.trials, self.rounds = task, list(trials), rounds
        self.device, self.dtype = device, dtype
        rounds_layers = device.type == "cuda" and dtype == torch.float32
        self.precision: Precision = precision if rounds_layers else "float32"
        self.deterministic = deterministic or device.type != "cuda"
        self.federation = federation or Federation()
        self._memory_places, self.shards = memory_places, shards
        parts = shards.count if shards else 1
        fitted, self._clients, self._servers = packed_rules(task, self.trials, dtype, device)
        self.client_numbers = self._clients.numbers  # hyper-parameters, one row per trial
        seeds, extra_epochs = [t.seed for t in self.trials], self._clients.rule.extra_epochs
        chosen = self.federation.participation
        self.planner = planner or RoundPlanner(task, seeds, chosen, extra_epochs)
        self.engines = engine if isinstance(engine, EnginePlanner) else EnginePlanner(engine)
        rule, longest = self._clients.rule, self.planner.longest
        self.program = build_program(task, rule, dtype, device, self.precision, longest)
        self._test = task.test.to(device, dtype)
        merged = self.federation, task, self.trials, dtype, device
        self.server_side = ServerSide.of(self._servers, *merged)
        if shards is not None:
            self.server_side.check_shards(shards.count)
        self._closing = Closing(self.server_side, [algorithm.client for algorithm in fitted])
        self._silent: State = None  # state that servers share, if it has no tensors
        self.round = 0
        self.snapshot, self.memory = self._begin(restored)
        self.runs_ahead = device.type == "cuda" and self.memory.is_empty and shards is None
        """A GPU works on a round while the host reads the one before. A round that reads client
        memory has to wait for the end of the previous one, which changes it."""
        self._next: _Launched | None = None
        self.stopped_trials: frozenset[int] = frozenset()  # these send to no client any more
        self._evaluated_at_once = len(self.trials)
        self._examples_at_once = task.examples_at_once
        goal = self.program.objective, task.metric, task.prepare

        def scores(chunk: int, params: Tree, examples: Examples) -> Tensor:
            return evaluate(params, examples, *goal, chunk=chunk)

        self._scores, self._replayed = scores, Replayed(scores)
        with self.numerics():
            # Copies of all updates of a round that are in memory at once.
            kept = 2 if self.server_side.aggregator is not None else int(self.server_side.guard)
            self.engines.plan(
                self.program, self.probe, trials=len(self.trials), rounds_left=rounds - self.round,
                clients=-(-self.planner.most_clients // parts), rows=kept,
            )  # fmt: skip
        self.engine = self.engines.build(self.program)

    def _begin(self, restored: Sequence[Checkpoint] | None) -> tuple[Snapshot, MemoryStore]:
        """Make the initial state, or restore one from checkpoints, all of one round."""
        task, seeds = self.task, [trial.seed for trial in self.trials]
        starts = stack([initial_params(task.model, task.init, seed) for seed in seeds])
        params = starts.map(lambda leaf: leaf.to(self.device, self.dtype))
        dry_run(self._clients, self._servers, params, self.server_side.aggregator)
        state = self._servers.map(lambda rule, p: rule.init(p), params)
        none = torch.zeros(len(seeds), dtype=torch.int64, device=self.device)
        traffic, merging = torch.stack([none, none], 1), self.server_side.init(params)
        snapshot = Snapshot(params, state, none == 0, none, traffic, merging)
        fresh = self._clients.map(lambda rule, p: rule.init_memory(p), params)
        where = fresh, len(self.task.train), self._memory_places
        memory = ShardedMemory(self.shards, *where) if self.shards else self.engines.memory(*where)
        if restored is None:
            for i in range(len(self.trials)):
                memory.rewind(i, 0)
            return snapshot, memory
        self.round = restored[0].round
        found = restored_snapshot(restored, snapshot, memory)
        return tree_map(lambda leaf: leaf.to(self.device), found), memory

    @property
    def choice(self) -> EngineChoice:
        """Execution path of the training."""
        return self.engines.choice

    @property
    def chunk(self) -> int | None:
        """Clients that train at once at most; None: all of a round."""
        return self.engines.chunk

    @contextlib.contextmanager
    def numerics(self, choice: EngineChoice | None = None) -> Iterator[None]:
        """Fix every setting that affects the last bit of a result."""
        kernels = contextlib.nullcontext() if choice is None else onednn(choice.onednn)
        few = threads(0 if choice is None else choice.threads)
        same = same_bits(self.deterministic and self.device.type == "cuda")
        last = channels_last(choice is not None and choice.channels_last)
        with kernels, last, few, rounding(self.precision), same:
            yield

    def histories(self, records: Sequence[Sequence[Record]]) -> list[History]:
        """Combine the trials' records with their present models."""
        now = self.snapshot.params
        return [
            History(self.task, trial, tuple(records[i]), row(now, i), engine=self.choice)
            for i, trial in enumerate(self.trials)
        ]

    def checkpoint(self, trial: int) -> Checkpoint:
        """Copy one trial's state after a round, and client memory that is not in files."""
        copied = {} if self._memory_places else self.memory.of_trial(trial)
        return Checkpoint.of(self.round, self.snapshot, trial, copied)

    def probe(self) -> Probe:
        """Plan one trial's first round with clients, on which engines are timed."""
        planned = (self.planner.batches(i) for i in range(1, min(self.rounds, PROBED_ROUNDS) + 1))
        owned = ([b for b in batches if b.trial == 0] for batches in planned)
        batches = next(filter(None, owned), None) or [self.planner.absent()]
        batches = batches[: -(-len(batches) // self.shards.count)] if self.shards else batches
        memory = self.read_memory([(batch.trial, batch.client) for batch in batches])
        return Probe(batches, self.broadcast(1, self.snapshot), memory)

    def broadcast(self, round_: int, now: Snapshot) -> Broadcast:
        """Make the message of every server to its clients."""
        params = now.params
        shared = self._silent
        if shared is None:
            shared = self._servers.map(lambda rule, s, _: rule.share(s), now.state, now.lost)
            if not leaves(shared):
                self._silent = shared
        if self.server_side.sends_own:
            params = self._servers.map(lambda rule, *own: rule.send(*own), params, now.state)
        stamp = torch.full((len(self.trials),), round_, dtype=torch.int64, device=self.device)
        return Broadcast(params, shared, self._clients.numbers, stamp)

    def read_memory(self, owners: list[tuple[int, int]]) -> State:
        """Copy memories to the device, of clients by trial and number."""
        return tree_map(lambda leaf: leaf.to(self.device), self.memory.read(owners))

    def run_round(self) -> RoundReport:
        """Train, merge, update and, when due, evaluate; then move to the next round."""
        began = time.perf_counter()
        with self.numerics(self.choice):
            launched = self._next or self.launch(self.round + 1, self.snapshot)
            self._next = None
            if self.runs_ahead and launched.round < self.rounds:
                self._next = self.launch(launched.round + 1, launched.snapshot)
            kept, guard = self.memory.kept_bytes, self.federation.guard
            records = launched.facts.records(launched.round, self.task, kept=kept, guard=guard)
        self.round, self.snapshot = launched.round, launched.snapshot
        for i in self.stopped_trials:
            records[i] = records[i]._replace(loss=None, metric=None)
        # Only in the first round: later a value near zero must not end a training of hours.
        for record in records if self.round == 1 else ():
            self.task.metric.check_value(record.metric)
        # A GPU that runs ahead is timed by its own clock: the host's would cover two rounds.
        seconds = launched.facts.device_seconds() or time.perf_counter() - began
        each = seconds / (len(self.trials) - len(self.stopped_trials))
        return RoundReport(self.round, [r._replace(seconds=each) for r in records], self)

    def stop(self, trials: Iterable[int]) -> None:
        """Stop some trials; only the width of the map changes for others."""
        before = self.stopped_trials
        self.stopped_trials |= frozenset(trials)
        if self.stopped_trials == before:
            return
        self._next = None  # it was launched with clients of stopped trials
        if self.deterministic and self.device.type == "cuda":
            self._rebuild()  # every width then has buffers of its own

    @property
    def all_stopped(self) -> bool:
        """No trial trains any more."""
        return len(self.stopped_trials) == len(self.trials)

    def launch(self, round_: int, before: Snapshot) -> _Launched:
        """Queue a round on the device; repeat it in smaller chunks if it does not fit."""
        while True:
            try:
                return self._launch_once(round_, before)
            except torch.OutOfMemoryError:
                if self.choice.path == "sequential":  # notes name client and step
                    raise
                # No state has changed; the error's traceback still holds tensors.
            self.engines.halve(len(self.planner.batches(round_)), self.device)
            self._rebuild()

    def _rebuild(self) -> None:
        del self.engine
        self._replayed = Replayed(self._scores)
        torch.cuda.empty_cache()
        self.engine = self.engines.build(self.program)

    def _launch_once(self, round_: int, before: Snapshot) -> _Launched:
        began = timer() if self.device.type == "cuda" else None
        if began is not None:
            began.record()
        # Plan and train; merge chunk by chunk, or all at once below.
        broadcast, memories, whole = self.broadcast(round_, before), Memories(), None
        if (sharded := merge_shards(self, round_, broadcast, before)) is not None:
            (sent, merger), batches = sharded, sharded[0]
        else:
            planned = [] if self.shards else self.planner.batches(round_)
            sent = [b for b in planned if b.trial not in self.stopped_trials]
            batches = sent or [self.planner.absent()]
            memory = self.read_memory([(b.trial, b.client) for b in batches])
            merger = self.server_side.merger(batches, before)
            chunks = self.engine.train(batches, broadcast, memory)
            if self._replays(len(batches)):
                first = next(chunks)  # a graph merges uploads that stay in their places
                stays = isinstance(self.engine, Sequential) and any(self.engine.kept)
                if (stays or self._has_graphs) and len(first.batches) == len(batches):
                    whole = first
                else:
                    merger.add(first)
            memories = merge_chunks(chunks, merger, batches, memory, self.memory)
        if self.device.type == "cuda" and self.shards is None:
            # The device is at work on this round: plan the next one meanwhile.
            self.planner.plan_ahead(round_ + 1)
        after, numbers, sizes = self._closing.close(round_, sent, broadcast, before, merger, whole)
        scores: list[Tensor] = []
        if (round_ - 1) % self.task.protocol.eval_every == 0 or round_ == self.rounds:
            scores = list(self._evaluate(after.params, self._test, round_).T)
            # A loss that is not finite ends the trial.
            after = after._replace(alive=after.alive & scores[0].isfinite())
        facts = RoundFacts(numbers, sizes, [after.alive, *scores], merger.clients, began)
        # Client memory is written only when all of the round has been computed.
        for (owners, kept), accepted in zip(memories, merger.accepted, strict=False):
            self.memory.write(owners, round_, kept, accepted.tolist())
        if self.shards is not None:
            self.shards.keep(round_)
        return _Launched(round_, after, facts)

    @property
    def _has_graphs(self) -> bool:
        return isinstance(self.engine, Vectorized) and self.engine.cuda_graph

    def _replays(self, clients: int) -> bool:
        """Tell whether merging and the server step are replayed if all clients are one chunk."""
        gpu = self._has_graphs or self.device.type == "cuda"
        # Tables suffice for merging if no stage needs single uploads.
        side, rule = self.server_side, self.server_side.rule.rule
        special = side.guard or side.aggregator or rule.own_weights or "client" in rule.needs
        return gpu and self.memory.is_empty and clients <= (self.chunk or clients) and not special

    def _evaluate(self, params: Tree, examples: Examples, round_: int) -> Tensor:
        """Compute loss and metric of every trial; zeros for stopped ones."""
        what = f"{examples.size} {'test' if examples is self._test else 'other'}"
        active = [i for i in range(len(self.trials)) if i not in self.stopped_trials]
        chosen = row(params, active) if self.stopped_trials else params
        while True:
            size, chunk = self._evaluated_at_once, self._examples_at_once
            some = (row(chosen, slice(i, i + size)) for i in range(0, len(active), size))
            try:
                few = min(size, len(active)) <= FEW_MODELS and examples is self._test
                with noted(lambda: f"evaluation of {what} examples after round {round_}"):
                    if few and self._has_graphs:
                        parts = [self._replayed(chunk, s, still=examples).clone() for s in some]
                    else:
                        parts = [self._scores(chunk, s, examples) for s in some]
                break
            except torch.OutOfMemoryError:
                if size > MIN_WIDTH:
                    self._evaluated_at_once = max(MIN_WIDTH, -(-size // 2))
                elif chunk > 1:
                    self._examples_at_once = chunk // 2
                else:
                    raise
                self._replayed = Replayed(self._scores)  # graphs hold memory, too
                torch.cuda.empty_cache()
        found = torch.cat(parts)
        if not self.stopped_trials:
            return found
        whole = found.new_zeros((len(self.trials), 2))
        whole[active] = found
        return whole

    def evaluate(self, examples: Examples | None = None) -> list[Evaluation]:
        """Compute loss and metric of every trial's model on the test examples, or on others."""
        data = self._test if examples is None else examples.to(self.device, self.dtype)
        with self.numerics(self.choice):
            found = self._evaluate(self.snapshot.params, data, self.round)
        evaluations = [Evaluation(*pair) for pair in found.tolist()]
        for evaluation in evaluations if self.round <= 1 else ():
            self.task.metric.check_value(evaluation.metric)
        return evaluations

    @functools.cached_property
    def _watched(self) -> Watched:
        return Watched.of(self.task)

    def evaluate_clients(self) -> list[ClientMetrics]:
        """Compute every trial's metrics on each client's own examples; see :class:`Watched`."""
        watched, round_ = self._watched, self.round
        data = self._test if watched.part == "test" else self.program.data.examples
        with self.numerics(self.choice):
            params, goal = self.snapshot.params, self.program.objective
            with noted(lambda: f"evaluation of clients on {watched.part} examples, round {round_}"):
                found = measure(self.task, watched, params, data, goal, self.round)
                own = own_metrics(self, watched, data)
        return [replace(one, **o) for one, o in zip(found, own, strict=True)]
