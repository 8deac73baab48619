"""Uploads of a round: merged, measured, and recorded per trial.

Message sizes follow from the shapes and types of what would travel. Arrays and scalars (steps,
rounds, losses, learning rates) are counted apart. Whole numbers travel in the narrowest integer
type that holds the round's longest stream of local steps. The number of bits that would suffice is
given beside it as a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import State
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger, Sums
from fedzmg.engine.local import Broadcast, Chunk
from fedzmg.simulation.history import Record
from fedzmg.tree import leaves, row, tree_map

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Shares of a cohort at which its training losses are recorded."""


EXAMPLE_COUNT = 8
"""Bytes of the example count that weights a client's upload."""


class Message(NamedTuple):
    """Bytes of one client's message."""

    arrays: int
    scalars: int
    bound: int
    """Arrays with whole numbers in as few bits as they need."""

    def times(self, messages: int) -> Message:
        """Sum several messages of this size."""
        return Message(*(messages * part for part in self))


def integer_bytes(longest: int) -> int:
    """Return the width of the narrowest signed integer type for sums of up to ``longest`` signs.

    >>> [integer_bytes(k) for k in (1, 127, 128, 32767, 32768)]
    [1, 1, 2, 2, 4]
    """
    return 1 if longest < 2**7 else 2 if longest < 2**15 else 4


def message_size(stacked: Any, longest: int) -> Message:
    """Measure one row of stacked values."""
    arrays = scalars = bits = 0
    for leaf in leaves(stacked):
        size = leaf[0].numel()
        if leaf.ndim == 1:
            scalars += leaf.element_size()
        elif leaf.is_floating_point():
            arrays += size * leaf.element_size()
            bits += size * leaf.element_size() * 8
        else:
            arrays += size * integer_bytes(longest)
            bits += size * math.ceil(math.log2(2 * longest + 1))
    return Message(arrays, scalars, math.ceil(bits / 8))


class Sizes(NamedTuple):
    """One trial's messages: down to its whole cohort, and up from one client."""

    down: Message
    one_up: Message


def message_sizes(
    batches: list[ClientBatch], broadcast: Broadcast, uploads: Any, *, cohort: int, counts: bool
) -> list[Sizes]:
    """Measure every trial's messages; ``counts``: clients also send their example counts."""
    longest = [0] * len(broadcast.round)
    for batch in batches:
        longest[batch.trial] = max(longest[batch.trial], len(batch.stream))
    extra = EXAMPLE_COUNT if counts else 0
    found: dict[int, Sizes] = {}
    for steps in set(longest):
        up = message_size(uploads, steps)
        down = message_size((broadcast.params, broadcast.shared), steps).times(cohort)
        found[steps] = Sizes(down, up._replace(scalars=up.scalars + extra))
    return [found[steps] for steps in longest]


def traffic_after(before: Tensor, sizes: list[Sizes], sums: Sums) -> Tensor:
    """Add a round to the bytes down and up so far; one row per trial, on the device."""
    one = [(s.down.arrays + s.down.scalars, s.one_up.arrays + s.one_up.scalars) for s in sizes]
    down, up = torch.tensor(one).to(before.device, non_blocking=True).T
    return before + torch.stack([down, up * (sums.clients + sums.dropped)], 1)


class ClientLosses:
    """Collects the mean training loss of every client of a round, on the device."""

    def __init__(self, batches: list[ClientBatch], trials: int) -> None:
        counts = [0] * trials
        columns = []
        for batch in batches:
            columns.append(counts[batch.trial])
            counts[batch.trial] += 1
        self._shape = trials, max(counts)
        self._cells = [b.trial * max(counts) + c for b, c in zip(batches, columns, strict=True)]
        self._parts: list[tuple[list[int], Tensor]] = []

    def add(self, chunk: Chunk, accepted: Tensor) -> None:
        """Add a chunk; clients that were not accepted do not count."""
        rows = torch.tensor(chunk.rows).to(accepted.device, non_blocking=True)
        losses = torch.where(accepted, chunk.outcomes.loss[rows].double(), torch.nan)
        self._parts.append(([self._cells[i] for i in chunk.batches], losses))

    def table(self) -> Tensor:
        """Return one row per trial, one column per client; NaN: the client does not count."""
        losses = torch.cat([part for _, part in self._parts])
        cells = torch.tensor([cell for own, _ in self._parts for cell in own])
        cells = cells.to(losses.device, non_blocking=True)
        blank = losses.new_full((self._shape[0] * self._shape[1],), torch.nan)
        return blank.index_copy_(0, cells, losses).reshape(self._shape)


def loss_quantiles(losses: list[float]) -> tuple[float, ...] | None:
    """Compute quantiles of the losses that are not NaN, to six digits; None if there are none."""
    ranked = sorted(loss for loss in losses if not math.isnan(loss))
    if not ranked:
        return None
    return tuple(float(f"{_quantile(ranked, share):.6g}") for share in QUANTILES)


def _quantile(ranked: list[float], share: float) -> float:
    """Interpolate a quantile between its neighbours."""
    position = (len(ranked) - 1) * share
    below = math.floor(position)
    low, high = ranked[below], ranked[min(below + 1, len(ranked) - 1)]
    # Between two infinities there is no difference to take.
    return low if low == high else low + (high - low) * (position - below)


class Reading:
    """Asynchronous copy of a table from a device.

    A plain read would also wait for work that was queued later, such as the next round.
    """

    def __init__(self, table: Tensor) -> None:
        self._host, self._copied = table, None
        if table.is_cuda:
            self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._host.copy_(table, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def rows(self) -> list[list[float]]:
        """Wait for the copy and return the table."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[list[float]] = self._host.tolist()
        return found


class RoundFacts(NamedTuple):
    """Numbers of a round on their way from the device."""

    reading: Reading
    columns: int
    """Columns before the clients' training losses."""
    sizes: list[Sizes]


def send_facts(
    alive: Tensor,
    traffic: Tensor,
    sums: Sums,
    scores: Tensor | None,
    sizes: list[Sizes],
    losses: Tensor,
) -> RoundFacts:
    """Copy the numbers of a round to the host in one transfer, without waiting for it.

    ``traffic`` includes the round; ``losses`` has a row per trial.
    """
    columns = [alive, sums.clients, sums.dropped, sums.steps, sums.loss]
    columns += [*traffic.T, *([] if scores is None else scores.T)]
    table = torch.cat([torch.stack([column.double() for column in columns], 1), losses], 1)
    return RoundFacts(Reading(table), len(columns), sizes)


def read_records(round_: int, facts: RoundFacts, *, kept: int, worst: float) -> list[Record]:
    """Make the records of a round, with zero seconds."""
    records = []
    for (down, one_up), values in zip(facts.sizes, facts.reading.rows(), strict=True):
        lives, loss = bool(values[0]), values[4]
        score, own = values[7 : facts.columns], values[facts.columns :]
        clients, dropped, steps, total_down, total_up = (int(values[i]) for i in (1, 2, 3, 5, 6))
        up = one_up.times(clients + dropped)
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
                bytes_kept=kept,
                total_bytes_down=total_down,
                total_bytes_up=total_up,
                seconds=0.0,
                loss=score[0] if score else None,
                metric=(score[1] if lives else worst) if score else None,
                diverged=not lives,
                client_loss=loss_quantiles(own),
            )
        )
    return records


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
