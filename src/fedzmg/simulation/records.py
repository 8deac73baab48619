"""What a round came to: bytes that moved, and one record per trial."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.aggregate import Sums
from fedzmg.engine.message_size import EXAMPLE_COUNT, Message, weigh
from fedzmg.engine.round import Broadcast, Chunk
from fedzmg.simulation.history import Record

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Shares of a cohort at which its training losses are recorded."""


class Sizes(NamedTuple):
    """One trial's messages: down to its whole cohort, and up from one client."""

    down: Message
    one_up: Message


def message_sizes(
    entries: list[ClientBatch], sent: Broadcast, uploads: Any, *, cohort: int, counts: bool
) -> list[Sizes]:
    """Size of every trial's messages; ``counts`` if clients also send their example counts."""
    longest = [0] * len(sent.round)
    for entry in entries:
        longest[entry.trial] = max(longest[entry.trial], len(entry.stream))
    extra = EXAMPLE_COUNT if counts else 0
    found: dict[int, Sizes] = {}
    for steps in set(longest):
        up = weigh(uploads, steps)
        down = weigh((sent.params, sent.shared), steps).times(cohort)
        found[steps] = Sizes(down, up._replace(scalars=up.scalars + extra))
    return [found[steps] for steps in longest]


def traffic_after(before: Tensor, sizes: list[Sizes], sums: Sums) -> Tensor:
    """Bytes down and up of all rounds, this one included; one row per trial, on the device."""
    one = [(s.down.arrays + s.down.scalars, s.one_up.arrays + s.one_up.scalars) for s in sizes]
    down, up = torch.tensor(one).to(before.device, non_blocking=True).T
    return before + torch.stack([down, up * (sums.clients + sums.dropped)], 1)


class ClientLosses:
    """Collects the mean training loss of every client of a round, on the device."""

    def __init__(self, entries: list[ClientBatch], trials: int) -> None:
        seen = [0] * trials
        turns = []
        for entry in entries:
            turns.append(seen[entry.trial])
            seen[entry.trial] += 1
        self._shape = trials, max(seen)
        self._places = [e.trial * max(seen) + t for e, t in zip(entries, turns, strict=True)]
        self._parts: list[tuple[list[int], Tensor]] = []

    def add(self, chunk: Chunk, accepted: Tensor) -> None:
        """Take in a chunk; clients that were not accepted do not count."""
        rows = torch.tensor(chunk.rows).to(accepted.device, non_blocking=True)
        losses = torch.where(accepted, chunk.outcomes.loss[rows].double(), torch.nan)
        self._parts.append(([self._places[i] for i in chunk.entries], losses))

    def table(self) -> Tensor:
        """One row per trial, one column per client; NaN where a client does not count."""
        losses = torch.cat([part for _, part in self._parts])
        places = torch.tensor([place for own, _ in self._parts for place in own])
        places = places.to(losses.device, non_blocking=True)
        blank = losses.new_full((self._shape[0] * self._shape[1],), torch.nan)
        return blank.index_copy_(0, places, losses).reshape(self._shape)


def spread(losses: list[float]) -> tuple[float, ...] | None:
    """Least, 10 %, median, 90 % and most of those that are numbers; None if there are none.

    Six digits: nobody needs more, and a log has many lines.
    """
    ranked = sorted(loss for loss in losses if not math.isnan(loss))
    if not ranked:
        return None
    return tuple(float(f"{_quantile(ranked, share):.6g}") for share in QUANTILES)


def _quantile(ranked: list[float], share: float) -> float:
    """The value that lies at this share of the way to the last one, between its neighbours."""
    place = (len(ranked) - 1) * share
    below = math.floor(place)
    low, high = ranked[below], ranked[min(below + 1, len(ranked) - 1)]
    # Between two infinities there is no difference to take.
    return low if low == high else low + (high - low) * (place - below)


class Reading:
    """Numbers on their way from a device; asking for them waits for these and for nothing else.

    A plain read would queue behind whatever the device has been given since, such as the next
    round.
    """

    def __init__(self, table: Tensor) -> None:
        self._here, self._arrived = table, None
        if table.is_cuda:
            self._here = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._here.copy_(table, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def rows(self) -> list[list[float]]:
        """The table, once it is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[list[float]] = self._here.tolist()
        return found


class Facts(NamedTuple):
    """What is to be known of a round, on its way from the device."""

    reading: Reading
    columns: int
    """Of the table, before the training losses of clients begin."""
    sizes: list[Sizes]


def send_facts(
    alive: Tensor,
    traffic: Tensor,
    sums: Sums,
    scores: Tensor | None,
    sizes: list[Sizes],
    losses: Tensor,
) -> Facts:
    """Send what a round came to; ``traffic`` includes it, ``losses`` has a row per trial.

    Everything travels at once: each transfer would wait for the device anew.
    """
    columns = [alive, sums.clients, sums.dropped, sums.steps, sums.loss]
    columns += [*traffic.T, *([] if scores is None else scores.T)]
    table = torch.cat([torch.stack([column.double() for column in columns], 1), losses], 1)
    return Facts(Reading(table), len(columns), sizes)


def read_records(round_: int, facts: Facts, *, kept: int, worst: float) -> list[Record]:
    """Records of a round, seconds left at zero."""
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
                client_loss=spread(own),
            )
        )
    return records
