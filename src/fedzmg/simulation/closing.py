"""The end of a round: merged uploads, the server step, and the numbers to record."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import ClientRule
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger, Tables
from fedzmg.engine.local import Broadcast, Chunk, Outcome
from fedzmg.engine.replay import Replayed, copied
from fedzmg.simulation.records import Message, RoundFacts, message_sizes
from fedzmg.simulation.server import ServerSide, Snapshot
from fedzmg.tree import leaves, row
from fedzmg.wrappers.parts import travelling


class Closed(NamedTuple):
    """A round that has ended."""

    snapshot: Snapshot  # the state after it
    numbers: Tensor  # see :meth:`RoundFacts.numbers`
    sizes: list[tuple[Message, Message]]


class Closing:
    """Ends rounds of a pack of trials; a GPU may replay all of it at once."""

    def __init__(self, side: ServerSide, client_rules: Sequence[ClientRule]) -> None:
        self._side, self._client_rules = side, client_rules
        self._replayed = Replayed(self._end_whole)

    def close(
        self, round_: int, sent: list[ClientBatch], broadcast: Broadcast, before: Snapshot,
        merger: Merger, whole: Chunk | None = None,
    ) -> Closed:  # fmt: skip
        """End a round with a merger of all clients, or with a chunk of all that is to be merged."""
        if whole is not None and leaves(whole.outcomes.upload.each):
            merger.add(whole)  # the server sees single clients, which tables do not describe
            whole = None
        planned = None if whole is None else merger.begin_whole(whole)
        sizes = self._sizes(sent, broadcast, merger)
        totals = torch.tensor([[m.arrays + m.scalars for m in both] for both in sizes])
        device = broadcast.round.device
        totals = totals.to(device, non_blocking=True)
        known = self._side.keys(round_, device), totals, broadcast.round, before
        if whole is None or planned is None:
            merger.finish()
            after, numbers = self._end(merger, *known)
        else:
            trials, *tables = planned
            bounds = trials.start, trials.stop
            after, numbers = copied(self._replayed(bounds, whole.outcomes, *tables, *known))
        return Closed(after, numbers, sizes)

    def _end_whole(
        self, bounds: tuple[int, int], outcomes: Outcome, tables: Tables, table: Tensor, *known: Any
    ) -> tuple[Snapshot, Tensor]:
        merger = self._side.merger([], known[-1])
        merger.add_rows(Chunk([], [], outcomes, 0), slice(*bounds), tables)
        merger.finish(table)
        return self._end(merger, *known)

    def _end(
        self, merger: Merger, keys: Any, sizes: Tensor, stamp: Tensor, before: Snapshot
    ) -> tuple[Snapshot, Tensor]:
        after = self._side.next_snapshot(merger, keys, stamp, before)
        down, up = sizes.T
        uploads = merger.sums.clients + merger.sums.dropped
        after = after._replace(traffic=before.traffic + torch.stack([down, up * uploads], 1))
        return after, RoundFacts.numbers(merger, after.traffic)

    def _sizes(
        self, sent: list[ClientBatch], broadcast: Broadcast, merger: Merger
    ) -> list[tuple[Message, Message]]:
        rule, one = self._side.rule.rule, row(merger.upload, 0)
        travels = broadcast._replace(params=travelling(rule, broadcast.params))
        uploads = [own.wire(one) for own in self._client_rules]
        counts = self._side.by_examples and not isinstance(merger.upload.weight, Tensor)
        return message_sizes(sent, travels, uploads, counts=counts, wire=rule.wire)
