"""Numbers of a round: message sizes, and a record per trial.

Message sizes follow from the shapes and types of what would travel. Arrays and scalars (steps,
rounds, losses, learning rates) are counted apart. Whole numbers travel in the narrowest integer
type that holds the round's longest stream of local steps; the bits they need are a lower bound.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.engine.aggregate import Merger
from fedzmg.engine.sums import OUTLIER, ratios_to_median
from fedzmg.kernels.precision import timer
from fedzmg.simulation.history import Record
from fedzmg.tasks.task import Task
from fedzmg.tree import leaves

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)  # shares of a cohort whose training losses are recorded
EXAMPLE_COUNT = 8  # bytes of the example count that weights a client's upload
MOST_NAMED, LONGEST_NAME = 50, 100  # clients of a record, and characters of a name, at most


class Message(NamedTuple):
    """Bytes of messages."""

    arrays: int
    scalars: int
    bound: int  # bytes of arrays if whole numbers had as few bits as they need

    def times(self, messages: int) -> "Message":
        """Sum several messages of this size."""
        return Message(*(messages * part for part in self))


def message_size(stacked: Any, longest: int) -> Message:
    """Measure one row of stacked values; whole numbers are sums of up to ``longest`` signs."""
    whole = 1 if longest < 2**7 else 2 if longest < 2**15 else 4
    arrays = scalars = bits = 0
    for leaf in leaves(stacked):
        size, each, is_real = leaf[0].numel(), leaf.element_size(), leaf.is_floating_point()
        if leaf.ndim == 1:
            scalars += each
        else:
            arrays += size * (each if is_real else whole)
            bits += size * (8 * each if is_real else math.ceil(math.log2(2 * longest + 1)))
    return Message(arrays, scalars, math.ceil(bits / 8))


def loss_quantiles(losses: list[float]) -> tuple[float, ...] | None:
    """Compute quantiles of the losses that are not NaN, to six digits; None if there are none."""
    ranked = sorted(loss for loss in losses if not math.isnan(loss))
    if not ranked:
        return None
    found = []
    for share in QUANTILES:
        below, part = divmod((len(ranked) - 1) * share, 1)
        low, high = ranked[int(below)], ranked[min(int(below) + 1, len(ranked) - 1)]
        # The difference of two infinities would be NaN.
        found.append(low if low == high else low + (high - low) * part)
    return tuple(float(f"{value:.6g}") for value in found)


def unusual_uploads(
    norms: Sequence[float], owners: Sequence[int | None], names: Sequence[str]
) -> tuple[tuple[str, float], ...]:
    """Return clients and ratios of outliers, from the norms of each part; owner None: no upload."""
    uploads = sum(owner is not None for owner in owners)
    parts = [norms[i : i + len(owners)] for i in range(0, len(norms), len(owners))]
    finite = [[norm for norm in part if not math.isnan(norm)] for part in parts]
    # Usually no norm is far from the others: no median is needed.
    if not uploads or all(len(f) == uploads and max(f) <= OUTLIER * min(f) for f in finite):
        return ()
    ratios = ratios_to_median(torch.tensor(parts, dtype=torch.float64)).tolist()
    return tuple(
        (names[owner][:LONGEST_NAME], math.inf if math.isnan(ratio) else float(f"{ratio:.6g}"))
        for owner, ratio in zip(owners, ratios, strict=True)
        if owner is not None and not ratio <= OUTLIER
    )


def _largest(uploads: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Return the largest of too many uploads for a line of a log."""
    if len(uploads) > MOST_NAMED:
        uploads = sorted(uploads, key=lambda upload: -upload[1])[:MOST_NAMED]
    return tuple(uploads)


class Reading:
    """Asynchronous copy of a table from a device, which does not wait for later rounds."""

    def __init__(self, table: Tensor) -> None:
        self._host, self.copied = table, None
        if table.is_cuda:
            self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._host.copy_(table, non_blocking=True)
            self.copied = timer()
            self.copied.record()

    def rows(self) -> list[list[float]]:
        if self.copied is not None:
            self.copied.synchronize()
        return self._host.tolist()


class RoundFacts:
    """Numbers of a round, copied from the device in one transfer without waiting.

    Every trial has a row of ``numbers``: see :meth:`numbers`; ``last`` are columns beside them:
    alive, and after an evaluation loss and metric.
    """

    def __init__(
        self, numbers: Tensor, sizes: list[tuple[Message, Message]], last: list[Tensor],
        clients: list[list[int | None]], began: torch.cuda.Event | None = None,
    ) -> None:  # fmt: skip
        columns = [column.double()[:, None] for column in last]
        self._reading = Reading(torch.cat([numbers, *columns], 1))
        self._last, self._sizes, self._clients, self._began = len(last), sizes, clients, began

    def device_seconds(self) -> float | None:
        """Return the seconds of a round on the clock of a GPU, after its records."""
        end = self._reading.copied
        return None if self._began is None or end is None else self._began.elapsed_time(end) / 1e3

    @staticmethod
    def numbers(merger: Merger, traffic: Tensor) -> Tensor:
        """Collect clients, dropped, steps, loss, bytes so far; then single losses and norms."""
        sums = merger.sums
        columns = sums.clients, sums.dropped, sums.steps, sums.loss, *traffic.T
        known = torch.stack([column.double() for column in columns], 1)
        return torch.cat([known, merger.losses, *merger.norms], 1)

    def records(self, round_: int, task: Task, *, kept: int, guard: bool) -> list[Record]:
        """Make the records of a round, with zero seconds."""
        records = []
        rows = zip(self._sizes, self._reading.rows(), self._clients, strict=True)
        for (down, one_up), values, owners in rows:
            clients, dropped, steps = (int(value) for value in values[:3])
            end, split = len(values) - self._last, 6 + len(owners)
            alive, *score = values[end:]
            up = one_up.times(clients + dropped)
            # The uploads of a diverged model say nothing about their clients.
            unusual = unusual_uploads(values[split:end], owners, task.train.names) if alive else ()
            rejected = [one for one in unusual if guard or math.isinf(one[1])]
            flagged = [one for one in unusual if one not in rejected]
            record = Record(
                round=round_, clients=clients, dropped=dropped, steps=steps,
                train_loss=values[3] / clients if clients else float("nan"), bytes_down=down.arrays,
                bytes_up=up.arrays, bytes_up_bound=up.bound, scalar_bytes_down=down.scalars,
                scalar_bytes_up=up.scalars, bytes_kept=kept, total_bytes_down=int(values[4]),
                total_bytes_up=int(values[5]), seconds=0.0, loss=score[0] if score else None,
                metric=(score[1] if alive else task.metric.worst) if score else None,
                diverged=not alive, client_loss=loss_quantiles(values[6:split]),
                rejected=_largest(rejected), flagged=_largest(flagged),
            )  # fmt: skip
            records.append(record)
        return records
