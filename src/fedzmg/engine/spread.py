"""One round on several devices: each trains a share of the clients, one of them merges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fedzmg.contract import State
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.round import Broadcast, Chunk, Engine
from fedzmg.tree import row, tree_map


@dataclass(frozen=True)
class Spread:
    """Engines side by side; outcomes come home to the first one's device.

    Entries are dealt out by whole runs of neighbours, so that a trial's clients mostly stay
    together, in shares of about equally many steps.
    """

    engines: tuple[tuple[torch.device, Engine], ...]

    def train(self, entries: list[ClientBatch], sent: Broadcast, memory: State) -> Iterator[Chunk]:
        """All devices at once; chunks in the order of the devices."""
        home = self.engines[0][0]
        shares = deal([len(entry.stream) for entry in entries], len(self.engines))

        def work(device: torch.device, engine: Engine, share: range) -> list[Chunk]:
            if not share:
                return []
            there: Broadcast = tree_map(lambda leaf: leaf.to(device), sent)
            own = tree_map(lambda leaf: leaf.to(device), row(memory, list(share)))
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                return [
                    chunk._replace(
                        entries=[share[i] for i in chunk.entries],
                        # A copy even at home: an engine's buffers are those of its next chunk.
                        outcomes=tree_map(lambda leaf: leaf.to(home, copy=True), chunk.outcomes),
                    )
                    for chunk in engine.train([entries[i] for i in share], there, own)
                ]

        with ThreadPoolExecutor(len(self.engines)) as pool:
            running = [
                pool.submit(work, device, engine, share)
                for (device, engine), share in zip(self.engines, shares, strict=True)
            ]
            for done in running:
                yield from done.result()


def deal(sizes: list[int], shares: int) -> list[range]:
    """Cut a row of sizes into runs of about equal sums.

    >>> [list(share) for share in deal([5, 5, 1, 1, 8], 2)]
    [[0, 1], [2, 3, 4]]
    """
    total, done, first = sum(sizes), 0, 0
    cuts = []
    for share in range(1, shares + 1):
        last = first
        while last < len(sizes) and (
            share == shares or done + sizes[last] / 2 < total * share / shares
        ):
            done += sizes[last]
            last += 1
        cuts.append(range(first, last))
        first = last
    return cuts
