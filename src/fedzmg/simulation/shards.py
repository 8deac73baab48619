"""A cohort in shards: parts of the population that train apart, in this process or in others.

The borders of shards follow from their number and the population, whatever trains them. Sums are
added in the order of shards, so that results do not depend on the number of workers.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger
from fedzmg.engine.client_memory import MemoryStore, ShardedMemory, shard_folder
from fedzmg.engine.local import Broadcast, Engine
from fedzmg.engine.sums import MergedPart
from fedzmg.simulation.server import Snapshot
from fedzmg.tree import State, leaves, row, tree_map

if TYPE_CHECKING:
    from fedzmg.simulation.rounds import Simulation

Memories = list[tuple[list[tuple[int, int]], State]]
"""Memories of clients after a round and their owners, (trial, client), chunk by chunk."""


class ShardPart(NamedTuple):
    """Result of a shard in a round."""

    batches: list[ClientBatch]  # clients, without the examples of their steps
    merged: MergedPart


class Shards(Protocol):
    """Trains the shards of every cohort."""

    count: int

    def open(self, fresh: State, clients: int, places: Sequence[Path] | None) -> Sequence[Any]:
        """Open a store of client memory per shard."""

    def train(
        self, simulation: "Simulation", round_: int, broadcast: Broadcast
    ) -> Iterable[ShardPart]:
        """Train a round; yield shards in order, without those that have no client in it."""

    def keep(self, round_: int) -> None:
        """Write the client memory of a round, after all of it has been computed."""


def shard_borders(clients: int, shards: int) -> npt.NDArray[np.int64]:
    """Return the first client of every shard, and the number of clients."""
    return np.arange(shards + 1, dtype=np.int64) * clients // shards


class LocalShards:
    """Shards that train one after another in this process: all of them, or some."""

    def __init__(self, count: int, own: Sequence[int] | None = None) -> None:
        self.count, self.own = count, range(count) if own is None else own
        self.stores: dict[int, MemoryStore] = {}
        self._kept: dict[int, tuple[Memories, list[Tensor]]] = {}

    def open(self, fresh: State, clients: int, places: Sequence[Path] | None) -> Sequence[Any]:
        self._borders = shard_borders(clients, self.count)
        for shard in self.own:
            own = places and [shard_folder(place, shard) for place in places]
            first, last = self._borders[shard : shard + 2]
            self.stores[shard] = MemoryStore(fresh, int(last - first), own)
        return [self.stores.get(shard) for shard in range(self.count)]

    def train(
        self, simulation: "Simulation", round_: int, broadcast: Broadcast
    ) -> Iterator[ShardPart]:
        parts = (self.train_one(simulation, shard, round_, broadcast) for shard in self.own)
        return filter(None, parts)

    def train_one(
        self, simulation: "Simulation", shard: int, round_: int, broadcast: Broadcast
    ) -> ShardPart | None:
        """Train the clients of one shard; None if it has none in this round."""
        first, last = (int(border) for border in self._borders[shard : shard + 2])
        planned = simulation.planner.batches(round_, range(first, last))
        batches = [batch for batch in planned if batch.trial not in simulation.stopped_trials]
        if not batches:
            return None
        owners = [(batch.trial, batch.client - first) for batch in batches]
        memory = self.stores[shard].read(owners)
        memory = tree_map(lambda leaf: leaf.to(simulation.device), memory)
        merger = simulation.server_side.merger(batches, simulation.snapshot)
        kept = train_batches(simulation.engine, merger, batches, broadcast, memory)
        own = [([(trial, client - first) for trial, client in who], state) for who, state in kept]
        self._kept[shard] = own, merger.accepted
        light = [batch._replace(stream=range(len(batch.stream))) for batch in batches]  # type: ignore[arg-type]
        return ShardPart(light, on_device(merger.part(), torch.device("cpu")))

    def keep(self, round_: int) -> None:
        for shard, (memories, accepted) in self._kept.items():
            for (owners, state), flags in zip(memories, accepted, strict=False):
                self.stores[shard].write(owners, round_, state, flags.tolist())
        self._kept.clear()


def on_device(part: MergedPart, device: torch.device) -> MergedPart:
    """Copy the tensors of a part to a device."""
    known = part._replace(order=[], computed=0)
    moved: MergedPart = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), known)
    return moved._replace(order=part.order, computed=part.computed)


def merge_shards(
    simulation: "Simulation", round_: int, broadcast: Broadcast, before: Snapshot
) -> tuple[list[ClientBatch], Merger] | None:
    """Train the shards of a round and add their sums; None if there is no client, or no shard."""
    shards = simulation.shards
    parts = [] if shards is None else list(shards.train(simulation, round_, broadcast))
    batches = [batch for part in parts for batch in part.batches]
    if not batches:
        return None
    merger, first = simulation.server_side.merger(batches, before), 0
    for part in parts:
        merger.add_part(on_device(part.merged, simulation.device), first)
        first += len(part.batches)
    return batches, merger


def train_batches(
    engine: Engine, merger: Merger, batches: list[ClientBatch], broadcast: Broadcast, memory: State
) -> Memories:
    """Train clients and merge their uploads; return their memories, which nobody has kept yet."""
    memories = Memories()
    for chunk in engine.train(batches, broadcast, memory):
        merger.add(chunk)
        if leaves(memory):
            owners = [(batches[i].trial, batches[i].client) for i in chunk.batches]
            kept = tree_map(Tensor.cpu, row(chunk.outcomes.memory, chunk.rows))
            memories.append((owners, kept))
    return memories


def open_memory(
    shards: Shards, fresh: State, clients: int, places: Sequence[Path] | None
) -> MemoryStore:
    """Open the client memory of a population in shards."""
    borders = shard_borders(clients, shards.count)
    return ShardedMemory(fresh, borders, shards.open(fresh, clients, places))
