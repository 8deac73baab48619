"""What the clients of a round send, merged chunk by chunk as an engine gives it."""

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


class Remembered(NamedTuple):
    """What clients of a chunk want to remember, before it is written down."""

    owners: list[tuple[int, int]]
    """Trial and client."""
    states: State
    accepted: Tensor
    """Whether the upload of each was, so that it may remember."""


class Received(NamedTuple):
    """What came of a round's local training."""

    merger: Merger
    losses: ClientLosses
    sample: Any
    """Uploads of some clients, for their size."""
    computed: int
    """Client steps."""
    remembered: list[Remembered]


def receive(
    chunks: Iterable[Chunk],
    entries: list[ClientBatch],
    trials: int,
    *,
    by_examples: bool,
    keeps_memory: bool,
) -> Received:
    """Take in the chunks of a round.

    Args:
        chunks: what an engine yields.
        entries: the clients of the round.
        trials: how many trials train together.
        by_examples: whether clients count by their examples; else equally.
        keeps_memory: whether clients remember anything.
    """
    weights = [_weight(entry, by_examples=by_examples) for entry in entries]
    merger, losses = Merger(entries, weights, trials), ClientLosses(entries, trials)
    sample: Any = ()
    computed = 0
    remembered: list[Remembered] = []
    for chunk in chunks:
        accepted = merger.add(chunk)
        losses.add(chunk, accepted)
        computed += chunk.computed
        sample = chunk.outcomes.upload
        if keeps_memory:
            owners = [(entries[i].trial, entries[i].client) for i in chunk.entries]
            kept = tree_map(torch.Tensor.cpu, row(chunk.outcomes.memory, chunk.rows))
            remembered.append(Remembered(owners, kept, accepted))
    return Received(merger, losses, sample, computed, remembered)


def _weight(entry: ClientBatch, *, by_examples: bool) -> float:
    """What a client counts in the average; nothing if it had no step to do."""
    if not len(entry.stream):
        return 0.0
    return float(entry.examples) if by_examples else 1.0
