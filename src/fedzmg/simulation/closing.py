"""The end of a round: merged uploads, the server step, and the numbers to record."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedzmg.contract import ClientRule
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Merger, Tables
from fedzmg.engine.local import Broadcast, Chunk, Models, Outcome
from fedzmg.engine.replay import Replayed, copied
from fedzmg.simulation.records import EXAMPLE_COUNT, Message, RoundFacts, message_size
from fedzmg.simulation.server import ServerSide, Snapshot
from fedzmg.tree import leaves, row
from fedzmg.wrappers.parts import travelling


class Closing:
    """Ends the rounds of a pack of trials; on a GPU maybe as one CUDA graph."""

    def __init__(self, side: ServerSide, client_rules: Sequence[ClientRule]) -> None:
        self._side, self._client_rules = side, client_rules
        self._replayed = Replayed(self._end_whole)
        self._known_sizes: dict[tuple[int, int, int], tuple[Message, Message]] = {}

    def close(
        self, round_: int, sent: list[ClientBatch], broadcast: Broadcast, before: Snapshot,
        merger: Merger, whole: Chunk | None = None,
    ) -> tuple[Snapshot, Tensor, list[tuple[Message, Message]]]:  # fmt: skip
        """End a round whose uploads are in a merger, or still in one chunk, ``whole``.

        Return the state after it, the numbers of :meth:`RoundFacts.numbers`, and message sizes.
        """
        if whole is not None and leaves(whole.outcomes.upload.each):
            merger.add(whole)  # the server sees single clients, which a graph's tables do not have
            whole = None
        planned = None if whole is None else merger.begin_whole(whole)
        sizes = self._sizes(sent, broadcast, merger)
        totals = torch.tensor([[m.arrays + m.scalars for m in both] for both in sizes])
        totals = totals.to(device := broadcast.round.device, non_blocking=True)
        known = self._side.keys(round_, device), totals, broadcast.round, before
        if whole is None or planned is None:
            merger.finish()
            after, numbers = self._end(merger, *known)
        else:
            trials, *tables = planned
            bounds, (rows, origin) = (trials.start, trials.stop), whole.models or ((), ())
            upload, _, *tallies = whole.outcomes
            own = *tables, origin, *tallies, *known
            after, numbers = copied(self._replayed(bounds, *own, still=(upload, rows)))
        return after, numbers, sizes

    def _end_whole(
        self, bounds: tuple[int, int], tables: Tables, table: Tensor, origin: list[Tensor],
        steps: Tensor, loss: Tensor, *rest: Any,
    ) -> tuple[Snapshot, Tensor]:  # fmt: skip
        *known, (upload, rows) = rest
        merger, models = self._side.merger([], known[-1]), Models(rows, origin) if origin else None
        chunk = Chunk([], [], Outcome(upload, (), steps, loss), models)
        merger.add_rows(chunk, slice(*bounds), tables)
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
        """Measure each trial's messages: down to all of its clients, and up from one client."""
        rule, found = self._side.rule.rule, []
        steps, clients = [0] * len(self._client_rules), [0] * len(self._client_rules)
        for batch in sent:
            steps[batch.trial] = max(steps[batch.trial], len(batch.stream))
            clients[batch.trial] += 1
        for own, longest, number in zip(self._client_rules, steps, clients, strict=True):
            key = id(own), longest, number
            both = self._known_sizes.get(key)
            if both is None:
                upload = own.wire(row(merger.upload, 0))
                if isinstance(upload, int):
                    up = Message(upload, 0, upload)
                else:
                    up = message_size(row(upload, None), longest)
                all_down = rule.wire(travelling(rule, broadcast.params), number), broadcast.shared
                down = message_size(all_down, longest).times(number)
                if self._side.by_examples and not isinstance(merger.upload.weight, Tensor):
                    up = up._replace(scalars=up.scalars + EXAMPLE_COUNT)
                both = down, up
                if not isinstance(upload, int):  # which does not follow from shapes
                    self._known_sizes[key] = both
            found.append(both)
        return found
