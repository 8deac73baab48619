"""Checkpoints of single trials, and a pack restored from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fedzmg.contract import State
from fedzmg.engine.client_memory import MemoryStore
from fedzmg.errors import InputError
from fedzmg.simulation.server import Snapshot
from fedzmg.tree import Tree, named_leaves, refill, row, stack


class Checkpoint(NamedTuple):
    """Everything that later rounds of one trial depend on, as named tensors."""

    round: int
    tensors: dict[str, Tensor]

    def params(self) -> Tree:
        """Return the global model."""
        prefix, suffix = "model.params['", "']"
        return Tree(
            {
                name.removeprefix(prefix).removesuffix(suffix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
        )


def checkpoint_of(
    round_: int, snapshot: Snapshot, trial: int, memories: Mapping[int, State]
) -> Checkpoint:
    """Copy a trial's row of a snapshot and its clients' memories."""
    tensors = {f"model{path}": t for path, t in named_leaves(row(snapshot, trial)).items()}
    for client, state in memories.items():
        tensors |= {f"memory|{client}|{p}": t for p, t in named_leaves(state).items()}
    return Checkpoint(round_, {n: t.detach().cpu().clone() for n, t in tensors.items()})


def restored_snapshot(
    checkpoints: Sequence[Checkpoint], fresh: Snapshot, memory: MemoryStore
) -> Snapshot:
    """Restore a snapshot, on the host, and the clients' memories."""
    if len({c.round for c in checkpoints}) != 1:
        raise InputError("packed trials can only be resumed from the same round")
    rows = []
    for i, (round_, tensors) in enumerate(checkpoints):
        rows.append(_filled(row(fresh, i), tensors, "model"))
        blank = row(memory.fresh, i)
        clients = {int(n.split("|")[1]) for n in tensors if n.startswith("memory|")}
        memories = {c: _filled(blank, tensors, f"memory|{c}|") for c in sorted(clients)}
        memory.rewind(i, round_)
        memory.put(i, round_, memories)
    found: Snapshot = stack(rows)
    return found


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
