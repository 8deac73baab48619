"""What a round came to: bytes that moved, and one record per trial."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.data.plan import Entry
from fedzmg.engine.aggregate import Sums
from fedzmg.engine.ledger import EXAMPLE_COUNT, Message, weigh
from fedzmg.engine.round import Broadcast
from fedzmg.simulation.history import Record


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


def read_records(
    round_: int,
    alive: Tensor,
    traffic: Tensor,
    sums: Sums,
    scores: Tensor | None,
    sizes: list[Sizes],
    *,
    kept: int,
    worst: float,
) -> tuple[list[Record], list[tuple[int, int]]]:
    """Records of a round, seconds left at zero, and the bytes of all rounds so far.

    Everything is read from the device at once: each transfer would wait for it anew.
    """
    columns = [alive, sums.clients, sums.dropped, sums.steps, sums.loss]
    columns += [*traffic.T, *([] if scores is None else scores.T)]
    read = torch.stack([column.double() for column in columns], 1).tolist()
    records, totals = [], []
    for (down, one_up), values in zip(sizes, read, strict=True):
        lives, loss, score = bool(values[0]), values[4], values[7:]
        clients, dropped, steps, before_down, before_up = (int(values[i]) for i in (1, 2, 3, 5, 6))
        up = one_up.times(clients + dropped)
        total = before_down + down.arrays + down.scalars, before_up + up.arrays + up.scalars
        totals.append(total)
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
                total_bytes_down=total[0],
                total_bytes_up=total[1],
                seconds=0.0,
                loss=score[0] if score else None,
                metric=(score[1] if lives else worst) if score else None,
                diverged=not lives,
            )
        )
    return records, totals
