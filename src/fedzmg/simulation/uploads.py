"""Merge the uploads of a round, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import State
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger
from fedzmg.engine.round import Chunk
from fedzmg.simulation.records import ClientLosses
from fedzmg.tree import row, tree_map


class NewMemory(NamedTuple):
    """New memory of the clients of a chunk, before it is written."""

    owners: list[tuple[int, int]]
    """Trial and client."""
    states: State
    accepted: Tensor
    """Flag per client: only accepted uploads change its memory."""


class Received(NamedTuple):
    """Result of a round's local training."""

    merger: Merger
    losses: ClientLosses
    sample: Any
    """Uploads of some clients, for their size."""
    computed: int
    """Client steps."""
    memories: list[NewMemory]


def receive(
    chunks: Iterable[Chunk],
    batches: list[ClientBatch],
    trials: int,
    *,
    by_examples: bool,
    keeps_memory: bool,
) -> Received:
    """Merge the chunks of a round."""
    weights = [(float(b.examples) if by_examples else 1.0) * bool(len(b.stream)) for b in batches]
    merger, losses = Merger(batches, weights, trials), ClientLosses(batches, trials)
    sample: Any = ()
    computed = 0
    memories: list[NewMemory] = []
    for chunk in chunks:
        accepted = merger.add(chunk)
        losses.add(chunk, accepted)
        computed += chunk.computed
        sample = chunk.outcomes.upload
        if keeps_memory:
            owners = [(batches[i].trial, batches[i].client) for i in chunk.batches]
            kept = tree_map(torch.Tensor.cpu, row(chunk.outcomes.memory, chunk.rows))
            memories.append(NewMemory(owners, kept, accepted))
    return Received(merger, losses, sample, computed, memories)
