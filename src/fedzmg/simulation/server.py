"""State of a pack of trials: before the first round, after a server step, and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.engine.aggregate import Merger
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.errors import InputError
from fedzmg.simulation.trial import PackedRule
from fedzmg.tree import State, Tree, named_leaves, refill, row, stack, tree_map

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


def next_snapshot(
    server: PackedRule, merger: Merger, population: int, stamp: Tensor, old: Snapshot
) -> Snapshot:
    """Apply the server step; a trial that lost every upload, or diverged, keeps its state."""
    cohort, sums = merger.cohort(population, stamp), merger.sums
    params, state = server.map(
        lambda rule, p, s, c: rule.update(p, s, c), old.params, old.state, cohort
    )
    moves = old.alive & (sums.clients > 0)

    def pick(new: Tensor, before: Tensor) -> Tensor:
        return torch.where(moves.reshape(-1, *[1] * (new.ndim - 1)), new, before)

    uploaded = sums.clients + sums.dropped > 0
    lost = torch.where((sums.clients == 0) & uploaded, old.lost + 1, torch.zeros_like(old.lost))
    return Snapshot(
        tree_map(pick, params, old.params),
        tree_map(pick, state, old.state),
        old.alive & (lost < DIVERGED_AFTER),
        lost,
        old.traffic,
    )


class Checkpoint(NamedTuple):
    """Everything that later rounds of one trial depend on, as named tensors."""

    round: int
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls, round_: int, snapshot: Snapshot, trial: int, memories: Mapping[int, State]
    ) -> Checkpoint:
        """Copy a trial's row of a snapshot and its clients' memories."""
        tensors = {f"model{path}": t for path, t in named_leaves(row(snapshot, trial)).items()}
        for client, state in memories.items():
            tensors |= {f"memory|{client}|{p}": t for p, t in named_leaves(state).items()}
        return cls(round_, {n: t.detach().cpu().clone() for n, t in tensors.items()})

    def params(self) -> Tree:
        """Return the global model."""
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
    """Fill a template with a checkpoint's tensors."""
    found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for name, leaf in named_leaves(template).items():
        other = found.get(name)
        if other is None or other.shape != leaf.shape or other.dtype != leaf.dtype:
            raise InputError(
                f"the checkpoint does not fit this run ({prefix}{name} is missing or has another "
                "shape): it was made with other settings; choose another directory"
            )
    return refill(template, found)
