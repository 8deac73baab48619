"""What a round came to: bytes that moved, and one record per trial."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.data.plan import Entry
from fedzmg.engine.aggregate import Sums
from fedzmg.engine.ledger import EXAMPLE_COUNT, Message, weigh
from fedzmg.engine.round import Broadcast, Chunk
from fedzmg.simulation.history import Record

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Shares of a cohort at which its training losses are recorded."""


class Sizes(NamedTuple):
    """One trial's messages: down to its whole cohort, and up from one client."""

    down: Message
    one_up: Message


def message_sizes(
    entries: list[Entry], sent: Broadcast, uploads: Any, *, cohort: int, counts: bool
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

    def __init__(self, clients: int, trials: int) -> None:
        self._shape = trials, clients // trials
        self._places: list[int] = []
        self._losses: list[Tensor] = []

    def add(self, chunk: Chunk, accepted: Tensor) -> None:
        """Take in a chunk; clients that were not accepted do not count."""
        rows = torch.tensor(chunk.rows).to(accepted.device, non_blocking=True)
        losses = chunk.outcomes.loss[rows].double()
        self._losses.append(torch.where(accepted, losses, torch.nan))
        self._places += chunk.entries

    def spread(self) -> Tensor:
        """Least, 10 %, median, 90 % and most, one row per trial; NaN where no client counts.

        Entries of a round lie trial after trial, equally many of each.
        """
        losses = torch.cat(self._losses)
        places = torch.tensor(self._places).to(losses.device, non_blocking=True)
        # NaN sorts behind every number, so those that count come first.
        ranked = torch.empty_like(losses).index_copy_(0, places, losses).reshape(self._shape)
        ranked = ranked.sort(1).values
        last = (ranked.isnan().logical_not().sum(1, keepdim=True) - 1).clamp(min=0)
        return torch.cat([_quantile(ranked, last, share) for share in QUANTILES], 1)


def _quantile(ranked: Tensor, last: Tensor, share: float) -> Tensor:
    """The value that lies at this share of the way to the last one, between its neighbours."""
    place = last.double() * share
    below = place.floor().long()
    low, high = ranked.gather(1, below), ranked.gather(1, (below + 1).minimum(last))
    # Between two infinities there is no difference to take.
    return torch.where(low == high, low, low + (high - low) * (place - below))


def _six_digits(values: list[float]) -> tuple[float, ...] | None:
    """What is kept of a spread: nobody needs more digits, and a log has many lines."""
    if all(math.isnan(value) for value in values):
        return None
    return tuple(float(f"{value:.6g}") for value in values)


def read_records(
    round_: int,
    alive: Tensor,
    traffic: Tensor,
    sums: Sums,
    scores: Tensor | None,
    sizes: list[Sizes],
    losses: Tensor,
    *,
    kept: int,
    worst: float,
) -> list[Record]:
    """Records of a round, seconds left at zero; ``traffic`` includes the round.

    Everything is read from the device at once: each transfer would wait for it anew.
    """
    columns = [alive, sums.clients, sums.dropped, sums.steps, sums.loss]
    columns += [*traffic.T, *losses.T, *([] if scores is None else scores.T)]
    read = torch.stack([column.double() for column in columns], 1).tolist()
    records = []
    for (down, one_up), values in zip(sizes, read, strict=True):
        lives, loss = bool(values[0]), values[4]
        spread, score = values[7 : 7 + len(QUANTILES)], values[7 + len(QUANTILES) :]
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
                client_loss=_six_digits(spread),
            )
        )
    return records
