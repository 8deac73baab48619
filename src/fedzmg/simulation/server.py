"""State of a pack of trials: before the first round, after a server step, and in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedzmg.contract import ServerRule, chain, structure
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.errors import InputError
from fedzmg.federation import Federation
from fedzmg.messages import Cohort
from fedzmg.seeds import key
from fedzmg.simulation.trial import PackedRule, Trial
from fedzmg.tasks.task import Task
from fedzmg.tree import State, Tree, named_leaves, refill, row, stack, tree_map
from fedzmg.wrappers.parts import travelling
from fedzmg.wrappers.wrapper import ServerWrapper

DIVERGED_AFTER = 3  # rounds in a row that lose every upload before a trial counts as diverged
TOGETHER = 16  # trials aggregated at once on a GPU, to bound memory; on a CPU one, for its bits


class Snapshot(NamedTuple):
    """Everything a later round depends on, one row per trial (client memory apart)."""

    params: Tree
    state: State
    alive: Tensor
    lost: Tensor  # rounds in a row that lost every upload
    traffic: Tensor  # bytes down and up of all rounds so far
    aggregator: State = ()


class ServerSide(NamedTuple):
    """Stages of a round that follow local training, for a pack of trials."""

    rule: PackedRule
    aggregator: PackedRule | None  # absent: the weighted mean
    by_examples: bool
    guard: bool
    seeds: Sequence[int]
    population: int
    sends_own: bool  # the rule sends another model than its parameters

    @classmethod
    def of(
        cls, rule: PackedRule, federation: Federation, task: Task, trials: Sequence[Trial],
        dtype: torch.dtype, device: torch.device,
    ) -> "ServerSide":  # fmt: skip
        """Combine an algorithm's rules with the stages of a federation, which must fit."""
        algorithms, chosen = [trial.algorithm for trial in trials], federation.aggregator
        first, packed = algorithms[0], None
        if chosen is not None:
            if first.aggregator is not None:
                own = f"merges updates by its own {type(first.aggregator).__name__}"
                raise InputError(f"{first.name} {own}: leave federation.aggregator out")
            algorithms = [replace(algorithm, aggregator=chosen) for algorithm in algorithms]
            first = algorithms[0]
        if first.aggregator is not None and not first.aggregator.streams:
            name, planned = type(first.aggregator).__name__, task.protocol.cohort
            first.aggregator.check_cohort(federation.participation.most_clients(planned, planned))
            if rule.rule.own_weights:
                problem = f"{first.name} weights updates itself, which {name} does not use"
                raise InputError(f"{problem}: leave federation.aggregator out")
            shared = replace(first, aggregator=structure(first.aggregator))
            packed = PackedRule.of("aggregator", shared, algorithms, dtype, device)
        forwards = ServerRule.send, ServerWrapper.send
        sends_own = any(type(inner).send not in forwards for inner in chain(rule.rule))
        return cls(
            rule, packed, first.weights == "examples", federation.guard,
            [trial.seed for trial in trials], len(task.train), sends_own,
        )  # fmt: skip

    def check_shards(self, count: int) -> None:
        """Refuse stages of a round that need every upload of a cohort at once."""
        for used, what in (
            (self.guard, "federation.guard"),
            (self.aggregator is not None, "an aggregator"),
            (self.rule.rule.own_weights, "this algorithm's server"),
        ):
            if used:
                problem = f"shards = {count}: {what} needs all uploads at once"
                raise InputError(f"{problem}: leave shards out")

    @property
    def fewest(self) -> int:
        """Uploads that an aggregator needs; zero without one."""
        return 0 if self.aggregator is None else max(self.aggregator.rule.fewest, 1)

    def init(self, params: Tree) -> State:
        if self.aggregator is None:
            return ()
        return self.aggregator.map(lambda rule, p: rule.init(p), travelling(self.rule.rule, params))

    def merger(self, batches: list[ClientBatch], old: Snapshot) -> Merger:

        def weigh(clients: Tensor, weights: Tensor) -> Any:
            def one(rule: Any, rows: tuple[Tensor, Tensor], state: State) -> Tensor:
                found: Tensor = rule.weigh(state, *rows)
                return F.pad(found, (0, clients.shape[1] - len(found)))

            return _by_cohort(self.rule, one, merger, (clients, weights), old.state)

        merger = Merger(
            batches, len(self.seeds), by_examples=self.by_examples, guard=self.guard,
            weigh=weigh if self.rule.rule.own_weights else None, fewest=self.fewest,
            by_client="client" in self.rule.rule.needs,
        )  # fmt: skip
        return merger

    def keys(self, round_: int, device: torch.device) -> Tensor | tuple[()]:
        """Return a key per trial for random numbers of the server rule, if it needs them."""
        if "key" not in self.rule.rule.needs:
            return ()
        drawn = torch.tensor([key(seed, "server", round_) for seed in self.seeds])
        return drawn.to(device, non_blocking=True)

    def next_snapshot(self, merger: Merger, keys: Any, stamp: Tensor, old: Snapshot) -> Snapshot:
        """Apply the server step; a trial that lost every upload, or diverged, keeps its state."""
        delta, merging = None, old.aggregator
        if self.aggregator is not None:
            merged = merger.rows()
            found, merging = _by_cohort(
                self.aggregator, lambda rule, r, s: rule.aggregate(r, s), merger, merged, merging
            )
            delta = found.to(merged.deltas.dtype)
        cohort, sums = merger.cohort(self.population, stamp, keys, delta), merger.sums
        if isinstance(cohort.valid, Tensor):
            rows = {name: getattr(cohort, name) for name in ("each", "valid", "clients")}
            own = old.params, old.state, cohort._replace(each=(), valid=(), clients=())
            params, state = _by_cohort(
                self.rule, lambda rule, r, p, s, c: rule.update(p, s, c._replace(**r)),
                merger, rows, *own,
            )  # fmt: skip
        else:
            # Every field costs the map a few microseconds: absent ones at the end are left out.
            known = cohort[:6] if isinstance(keys, tuple) else tuple(cohort)
            params, state = self.rule.apply(
                lambda rule, p, s, c: rule.update(p, s, Cohort(*c)), old.params, old.state, known
            )
        moves = old.alive & (sums.clients > 0)

        def pick(new: Tensor, before: Tensor) -> Tensor:
            return torch.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, before)

        if not (moves.is_cpu and bool(moves.all())):  # else nothing is copied
            params, state = tree_map(pick, (params, state), (old.params, old.state))
            merging = tree_map(pick, merging, old.aggregator) if self.aggregator else ()

        # A cohort that was too small from the start lost no upload.
        uploaded = sums.clients + sums.dropped >= max(self.fewest, 1)
        lost = torch.where((sums.clients == 0) & uploaded, old.lost + 1, torch.zeros_like(old.lost))
        alive = old.alive & (lost < DIVERGED_AFTER)
        return Snapshot(params, state, alive, lost, old.traffic, merging)


def _by_cohort(
    packed: PackedRule, function: Callable[..., Any], merger: Merger, rows: Any, *own: Any
) -> Any:
    """Map ``function(rule, rows, *own)`` over trials, their cohorts not padded to others'."""
    sizes, parts = merger.cohort_sizes(), []
    step = TOGETHER if merger.sums.weight.is_cuda else 1
    for first in range(0, len(sizes), step):
        chosen = slice(first, first + step)
        widest = max(1, *sizes[chosen])
        numbers, shown, others = row((packed.numbers, rows, own), chosen)
        shown = tree_map(lambda leaf, width=widest: leaf[:, :width], shown)
        parts.append(PackedRule(packed.rule, numbers).map(function, shown, *others))
    return tree_map(lambda *found: torch.cat(found), parts[0], *parts[1:])


class Checkpoint(NamedTuple):
    """Everything that later rounds of one trial depend on, as named tensors."""

    round: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, round_: int, snapshot: Snapshot, trial: int, memories: Mapping[int, State]
    ) -> "Checkpoint":
        """Copy a trial's row of a snapshot and its clients' memories."""
        tensors = {f"model{path}": t for path, t in named_leaves(row(snapshot, trial)).items()}
        for client, state in memories.items():
            tensors |= {f"memory|{client}|{p}": t for p, t in named_leaves(state).items()}
        return cls(round_, {n: t.detach().cpu().clone() for n, t in tensors.items()})

    def params(self) -> Tree:
        start, end = "model.params['", "']"
        named = {n: t for n, t in self.tensors.items() if n.startswith(start)}
        return Tree({n.removeprefix(start).removesuffix(end): t for n, t in named.items()})


def restored_snapshot(
    checkpoints: Sequence[Checkpoint], fresh: Snapshot, memory: MemoryStore
) -> Snapshot:
    """Restore a snapshot, on the host, and the clients' memories."""
    if len({c.round for c in checkpoints}) != 1:
        raise InputError("packed trials can only be resumed from the same round")
    rows: list[Snapshot] = []
    for i, (round_, tensors) in enumerate(checkpoints):
        rows.append(_filled(row(fresh, i), tensors, "model"))
        blank = row(memory.fresh, i)
        clients = {int(n.split("|")[1]) for n in tensors if n.startswith("memory|")}
        memory.rewind(i, round_)
        memory.put(i, round_, {c: _filled(blank, tensors, f"memory|{c}|") for c in clients})
    return stack(rows)


def _filled(template: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name, leaf in named_leaves(template).items():
        other = found.get(name)
        if other is None or other.shape != leaf.shape or other.dtype != leaf.dtype:
            problem = f"({prefix}{name} is missing or has another shape)"
            remedy = "it was made with other settings; choose another directory"
            raise InputError(f"the checkpoint does not fit this run {problem}: {remedy}")
    return refill(template, found)
