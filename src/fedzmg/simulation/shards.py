"""A cohort in shards: parts of the population that train apart, in this process or in others.

The borders of shards depend only on their number and the population. Sums are added in the order
of shards, so results do not depend on the number of workers.
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
from fedzmg.engine.client_memory import SHARDS, MemoryStore, shard_folder
from fedzmg.engine.local import Broadcast, Chunk
from fedzmg.engine.sums import MergedPart
from fedzmg.simulation.server import Snapshot
from fedzmg.tree import State, leaves, row, tree_map

if TYPE_CHECKING:
    from fedzmg.simulation.rounds import Simulation

Memories = list[tuple[list[tuple[int, int]], Tensor]]
"""Owners, (trial, client), and flat memories of clients after a round, chunk by chunk."""


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
        fresh = tree_map(Tensor.cpu, fresh)  # files keep the memory of shards
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
        store = self.stores[shard]
        memory = tree_map(lambda leaf: leaf.to(simulation.device), store.read(owners))
        merger = simulation.server_side.merger(batches, simulation.snapshot)
        chunks = simulation.engine.train(batches, broadcast, memory)
        kept = merge_chunks(chunks, merger, batches, memory, store)
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
    known = part._replace(order=[])
    moved: MergedPart = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), known)
    return moved._replace(order=part.order)


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


def merge_chunks(
    chunks: Iterator[Chunk], merger: Merger, batches: list[ClientBatch], memory: State,
    store: MemoryStore,
) -> Memories:  # fmt: skip
    """Train clients and merge their uploads; return their memories, not yet in their store."""
    memories = Memories()
    for chunk in chunks:
        merger.add(chunk)
        if leaves(memory):
            owners = [(batches[i].trial, batches[i].client) for i in chunk.batches]
            memories.append((owners, store.flat(row(chunk.outcomes.memory, chunk.rows))))
    return memories


class ShardedMemory(MemoryStore):
    """Memories of clients in shards, each in a store of its own, maybe of another process.

    Shard ``i`` has the clients from ``borders[i]`` up to ``borders[i + 1]``.
    """

    def __init__(
        self, shards: Shards, fresh: State, clients: int, places: Sequence[Path] | None
    ) -> None:
        super().__init__((), 0)
        self.fresh = tree_map(lambda leaf: leaf.cpu(), fresh)
        self._borders = shard_borders(clients, shards.count)
        self._stores = shards.open(fresh, clients, places)
        self.kept_bytes = MemoryStore(self.fresh, 0, ()).kept_bytes

    def read(self, owners: list[tuple[int, int]]) -> State:
        if self.is_empty:
            return self.fresh
        clients = np.array([client for _, client in owners])
        shards = np.searchsorted(self._borders, clients, side="right") - 1
        parts, places = [], []
        for shard in np.unique(shards):
            own = np.flatnonzero(shards == shard)
            first = int(self._borders[shard])
            inside = [(owners[i][0], owners[i][1] - first) for i in own]
            parts.append(self._stores[shard].read(inside))
            places.append(own)
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return tree_map(lambda *found: torch.cat(found)[order], parts[0], *parts[1:])

    def of_trial(self, trial: int) -> dict[int, State]:
        found: dict[int, State] = {}
        for first, store in zip(self._borders, self._kept(), strict=False):
            found |= {int(first) + client: s for client, s in store.of_trial(trial).items()}
        return found

    def put(self, trial: int, round_: int, memories: dict[int, State]) -> None:
        borders = self._borders
        for first, last, store in zip(borders, borders[1:], self._kept(), strict=False):
            own = {c - int(first): s for c, s in memories.items() if first <= c < last}
            store.put(trial, round_, own)

    def flush(self) -> None:
        for store in self._kept():
            store.flush()

    def mark(self, trial: int, round_: int) -> str:
        marks = [store.mark(trial, round_) for store in self._kept()]
        return SHARDS.join(marks) if all(marks) else ""

    def commit(self, *rounds: int) -> None:
        for store in self._kept():
            store.commit(*rounds)

    def rewind(self, trial: int, round_: int) -> None:
        for store in self._kept():
            store.rewind(trial, round_)

    def _kept(self) -> Sequence[Any]:
        return () if self.is_empty else self._stores
