"""Merge uploads into one cohort per trial.

Sums form a monoid: a cohort can be merged client by client, chunk by chunk or machine by machine.
Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort does not move a bit. Every upload is one flat row while it is merged: a few
operations on one matrix instead of many on every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.contract import Cohort
from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Chunk
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

    @classmethod
    def empty(cls, averaged: Tensor, total: Tensor, trials: int) -> Sums:
        """Make the neutral element for rows like these."""
        count = torch.zeros(trials, dtype=torch.int64, device=averaged.device)
        return cls(
            averaged.new_zeros(trials, averaged.shape[1]),
            total.new_zeros(trials, total.shape[1]),
            count.double(),
            count,
            count.clone(),
            count.clone(),
            count.double(),
        )


class _Schedule(NamedTuple):
    """Row of a chunk that each trial adds at each step of the merge; weight zero: none."""

    trials: slice
    rows: Tensor
    weights: Tensor


class Merger:
    """Adds the uploads of one round, chunk by chunk."""

    def __init__(self, batches: list[ClientBatch], weights: list[float], trials: int) -> None:
        self._batches, self._weights, self._trials = batches, weights, trials
        self._sums: Sums | None = None
        self._forms: tuple[Flat, Flat] | None = None

    def add(self, chunk: Chunk) -> Tensor:
        """Merge a chunk; return a flag per client: whether its upload was accepted.

        An upload with a value that is not finite is dropped and counted. A client of weight zero
        sent nothing. Nothing here waits for the device.
        """
        upload = chunk.outcomes.upload
        averaged, form = flatten_rows((upload.delta, upload.average))
        total, total_form = flatten_rows(upload.total, like=averaged)
        if self._sums is None:
            self._sums = Sums.empty(averaged, total, self._trials)
            self._forms = form, total_form
        # The largest absolute value is not finite if any is not: one pass, and nothing written.
        finite = _largest(averaged).isfinite() & _largest(total).isfinite()
        # Zero times a value that is not finite is not zero, so such a row is blanked first.
        averaged.masked_fill_(~finite[:, None], 0)
        total.masked_fill_(~finite[:, None], 0)
        schedule = self._schedule(chunk)
        rows = schedule.rows.to(averaged.device, non_blocking=True)
        weights = schedule.weights.to(averaged.device, non_blocking=True)
        uploaded = weights > 0
        accepted = uploaded & finite[rows]
        weights = torch.where(accepted, weights, 0.0)
        factors = weights.to(averaged.dtype)[:, :, None]
        sums = Sums(*(part[schedule.trials] for part in self._sums))
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
        return finite[order] & known.to(finite.device, non_blocking=True)

    def _schedule(self, chunk: Chunk) -> _Schedule:
        """Order the rows of a chunk as the cohort, trials side by side."""
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
        return _Schedule(trials, torch.from_numpy(rows), torch.from_numpy(weights))

    @property
    def sums(self) -> Sums:
        """Everything merged so far."""
        assert self._sums is not None, "a round has at least one chunk"
        return self._sums

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
