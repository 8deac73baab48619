"""Merge uploads into one cohort per trial.

Sums form a monoid: a cohort can be merged client by client, chunk by chunk or machine by machine.
Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort does not move a bit. Every upload is one flat row while it is merged: a few
operations on one matrix instead of many on every layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Chunk
from fedzmg.messages import Cohort, Upload
from fedzmg.tree import Flat, flatten_rows, unflatten_rows


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    averaged: Tensor
    """Weight times (delta, average), flat."""
    total: Tensor
    weight: Tensor
    clients: Tensor
    """Uploads merged."""
    dropped: Tensor
    """Uploads rejected because they were not finite."""
    steps: Tensor
    loss: Tensor


class Merger:
    """Adds the uploads of one round, chunk by chunk."""

    sums: Sums
    """Everything merged so far."""
    upload: Upload
    """Uploads of some clients, for their size."""

    def __init__(self, batches: list[ClientBatch], trials: int, *, by_examples: bool) -> None:
        self._batches, self._trials = batches, trials
        # A client without a batch sends nothing and has weight zero.
        self._weights = [
            (float(b.examples) if by_examples else 1.0) * bool(len(b.stream)) for b in batches
        ]
        self._forms: tuple[Flat, Flat] | None = None
        self._losses: list[Tensor] = []
        self._order: list[int] = []
        """Batches that the losses belong to."""
        self.computed = 0
        """Client steps, padding included."""

    def add(self, chunk: Chunk) -> Tensor:
        """Merge a chunk; return a flag per client: whether its upload was accepted.

        An upload with a value that is not finite is dropped and counted. Nothing here waits for the
        device.
        """
        self.upload = chunk.outcomes.upload
        self.computed += chunk.computed
        averaged, form = flatten_rows((self.upload.delta, self.upload.average))
        total, total_form = flatten_rows(self.upload.total, like=averaged)
        if self._forms is None:
            self._forms = form, total_form
            rows, totals = (t.new_zeros(self._trials, t.shape[1]) for t in (averaged, total))
            weight, loss = averaged.new_zeros(2, self._trials, dtype=torch.float64)
            clients, dropped, steps = averaged.new_zeros(3, self._trials, dtype=torch.int64)
            self.sums = Sums(rows, totals, weight, clients, dropped, steps, loss)
        # The largest absolute value is not finite if any is not: one pass, and nothing written.
        finite = _largest(averaged).isfinite() & _largest(total).isfinite()
        # Zero times a value that is not finite is not zero, so such a row is blanked first.
        averaged.masked_fill_(~finite[:, None], 0)
        total.masked_fill_(~finite[:, None], 0)
        trials, *schedule = self._schedule(chunk)
        rows, weights = (part.to(averaged.device, non_blocking=True) for part in schedule)
        uploaded = weights > 0
        accepted = uploaded & finite[rows]
        weights = torch.where(accepted, weights, 0.0)
        factors = weights.to(averaged.dtype)[:, :, None]
        sums = Sums(*(part[trials] for part in self.sums))
        sums.weight.add_(weights.sum(0))
        sums.clients.add_(accepted.sum(0))
        sums.dropped.add_((uploaded & ~accepted).sum(0))
        sums.steps.add_(torch.where(accepted, chunk.outcomes.steps[rows], 0).sum(0))
        losses = torch.where(accepted, chunk.outcomes.loss[rows].double(), 0.0)
        for i, chosen in enumerate(rows):
            sums.averaged.add_(averaged[chosen] * factors[i])
            sums.loss.add_(losses[i])
            if total.shape[1]:
                sums.total.add_(torch.where(accepted[i][:, None], total[chosen], 0))
        order = torch.tensor(chunk.rows).to(finite.device, non_blocking=True)
        known = torch.tensor([self._weights[i] > 0 for i in chunk.batches])
        merged = finite[order] & known.to(finite.device, non_blocking=True)
        self._losses.append(torch.where(merged, chunk.outcomes.loss[order].double(), torch.nan))
        self._order += chunk.batches
        return merged

    def _schedule(self, chunk: Chunk) -> tuple[Any, Tensor, Tensor]:
        """Order the rows of a chunk as the cohort, trials side by side.

        Returns the trials, the row that each adds at each step, and its weight; zero: none.
        """
        queues: dict[int, list[tuple[int, float]]] = {}
        for i in sorted(range(len(chunk.batches)), key=chunk.batches.__getitem__):
            batch, weight = chunk.batches[i], self._weights[chunk.batches[i]]
            queue = queues.setdefault(self._batches[batch].trial, [])
            if weight > 0:
                queue.append((chunk.rows[i], weight))
        # Batches are sorted by trial, so the trials of a chunk are neighbours.
        trials = slice(min(queues), max(queues) + 1)
        longest = max(len(queue) for queue in queues.values())
        rows = np.zeros((longest, trials.stop - trials.start), dtype=np.int64)
        weights = np.zeros(rows.shape)
        for trial, queue in queues.items():
            for i, (row, weight) in enumerate(queue):
                rows[i, trial - trials.start] = row
                weights[i, trial - trials.start] = weight
        return trials, torch.from_numpy(rows), torch.from_numpy(weights)

    def losses(self) -> Tensor:
        """Return the clients' mean training losses, one row per trial, filled up with NaN."""
        own: list[list[int]] = [[] for _ in range(self._trials)]
        for position, batch in enumerate(self._order):
            own[self._batches[batch].trial].append(position)
        width = max(map(len, own))
        index = torch.tensor([found + [-1] * (width - len(found)) for found in own])
        values = torch.cat([*self._losses, self.sums.loss.new_full((1,), torch.nan)])
        return values[index.to(values.device, non_blocking=True)]

    def cohort(self, population: int, round_: Tensor) -> Cohort:
        """Average and total every trial; a trial that lost every upload gets zeros."""
        assert self._forms is not None
        sums = self.sums
        weight = torch.where(sums.weight > 0, sums.weight, 1.0).to(sums.averaged.dtype)
        delta, average = unflatten_rows(sums.averaged / weight[:, None], self._forms[0])
        total = unflatten_rows(sums.total, self._forms[1])
        population_ = torch.full_like(sums.clients, population)
        return Cohort(delta, average, total, sums.clients, population_, round_)


def _largest(rows: Tensor) -> Tensor:
    """Compute the largest absolute value of every row; NaN if the row has one."""
    if not rows.shape[1]:
        return rows.new_zeros(len(rows))
    largest: Tensor = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    return largest
