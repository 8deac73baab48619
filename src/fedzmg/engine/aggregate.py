"""Merge uploads into one cohort per trial.

Sums form a monoid: a cohort can be merged client by client, chunk by chunk or machine by machine.
Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort does not move a bit. Every upload is one flat row while it is merged: a few
operations on one matrix instead of many on every layer.

An upload is an outlier if its norm is far above the median of its trial's uploads. The median is
known only after the last chunk, so a guard that rejects outliers keeps all rows until then.
"""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.data.plan import ClientBatch
from fedzmg.engine.local import Chunk
from fedzmg.messages import Cohort, Upload
from fedzmg.tree import Flat, flatten_rows, unflatten_rows

OUTLIER = 100.0
"""Norm of an outlier over the median of its cohort, at least."""
FEWEST = 3
"""Uploads that a cohort needs for its median to judge any of them."""


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    averaged: Tensor
    """Weight times (delta, average), flat."""
    total: Tensor
    weight: Tensor
    clients: Tensor
    """Uploads merged."""
    dropped: Tensor
    """Uploads rejected: not finite, or an outlier under a guard."""
    steps: Tensor
    loss: Tensor


class _Uploads(NamedTuple):
    """Flat uploads of a chunk; ``batches[i]`` has row ``rows[i]``, and entry ``i`` elsewhere."""

    batches: list[int]
    rows: Tensor
    averaged: Tensor
    total: Tensor
    steps: Tensor
    loss: Tensor


class Merger:
    """Adds the uploads of one round, chunk by chunk; :meth:`finish` follows the last one.

    A ``guard`` rejects outliers like uploads that are not finite.
    """

    sums: Sums
    """Everything merged so far."""
    upload: Upload
    """Uploads of some clients, for their size."""
    clients: list[list[int | None]]
    """Clients of every trial; None: no upload."""
    losses: Tensor
    """Mean training losses of these clients; NaN: not merged."""
    norms: Tensor
    """Norms of delta, average and total, as far as there are any, of these clients; NaN: not
    finite, or no upload."""

    def __init__(
        self, batches: list[ClientBatch], trials: int, *, by_examples: bool, guard: bool = False
    ) -> None:
        self._batches, self._trials, self._guard = batches, trials, guard
        # A client without a batch sends nothing and has weight zero.
        self._weights = [
            (float(b.examples) if by_examples else 1.0) * bool(len(b.stream)) for b in batches
        ]
        self._forms: tuple[Flat, Flat] | None = None
        self._order: list[int] = []
        """Batches that the facts belong to."""
        self._facts: list[Tensor] = []
        """Loss and norms of every client, chunk by chunk."""
        self._kept: list[_Uploads] = []
        self.accepted: list[Tensor] = []
        """Flags of the clients whose uploads count, chunk by chunk."""
        self.computed = 0
        """Client steps, padding included."""

    def add(self, chunk: Chunk) -> None:
        """Merge a chunk, or keep it for the guard.

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
        split = sum(shape.numel() for shape in form.shapes[: len(self.upload.delta)])
        parts = (averaged[:, :split], averaged[:, split:], total)
        norms = [_largest(part).double() for part in parts if part.shape[1]]
        facts = torch.stack([chunk.outcomes.loss.double(), *norms])
        finite = facts[1:].isfinite().all(0)
        # Zero times a value that is not finite is not zero, so such a row is blanked first.
        for part in (averaged, total):
            if part.shape[1]:
                part.masked_fill_(~finite[:, None], 0)
        order = torch.tensor(chunk.rows).to(finite.device, non_blocking=True)
        known = torch.tensor([self._weights[i] > 0 for i in chunk.batches])
        merged = finite[order] & known.to(finite.device, non_blocking=True)
        facts, steps = facts[:, order], chunk.outcomes.steps[order]
        self._facts.append(torch.where(merged, facts, nan))
        self._order += chunk.batches
        uploads = _Uploads(chunk.batches, order, averaged, total, steps, facts[0])
        if self._guard:
            self._kept.append(uploads)
        else:
            self._merge(uploads, merged)

    def finish(self) -> None:
        """Line up the clients of every trial; with a guard, merge all uploads but outliers."""
        own: list[list[int]] = [[] for _ in range(self._trials)]
        for position, batch in enumerate(self._order):
            own[self._batches[batch].trial].append(position)
        table = [found + [-1] * (max(map(len, own)) - len(found)) for found in own]
        self.clients = [[self._client(position) for position in row] for row in table]
        filled = torch.cat(
            [*self._facts, self._facts[0].new_full((len(self._facts[0]), 1), nan)], 1
        )
        facts = filled[:, torch.tensor(table).to(filled.device, non_blocking=True)]
        self.losses, self.norms = facts[0], facts[1:]
        if self._guard:
            usual = ratios_to_median(self.norms) <= OUTLIER
            self.losses = torch.where(usual, self.losses, nan)
            places = torch.from_numpy(np.argsort(table, axis=None)[-len(self._order) :])
            usual = usual.flatten()[places.to(usual.device, non_blocking=True)]
            for uploads in self._kept:
                self._merge(uploads, usual[: len(uploads.batches)])
                usual = usual[len(uploads.batches) :]
            self._kept = []

    def _client(self, position: int) -> int | None:
        batch = self._order[position]
        return self._batches[batch].client if position >= 0 and self._weights[batch] else None

    def _merge(self, uploads: _Uploads, merged: Tensor) -> None:
        """Add uploads to the sums; ``merged`` flags those that count."""
        averaged, total = uploads.averaged, uploads.total
        trials, *schedule = self._schedule(uploads.batches)
        places, weights = (part.to(averaged.device, non_blocking=True) for part in schedule)
        uploaded = weights > 0
        accepted = uploaded & merged[places]
        weights = torch.where(accepted, weights, 0.0)
        factors = weights.to(averaged.dtype)[:, :, None]
        sums = Sums(*(part[trials] for part in self.sums))
        sums.weight.add_(weights.sum(0))
        sums.clients.add_(accepted.sum(0))
        sums.dropped.add_((uploaded & ~accepted).sum(0))
        sums.steps.add_(torch.where(accepted, uploads.steps[places], 0).sum(0))
        losses = torch.where(accepted, uploads.loss[places], 0.0)
        for i, chosen in enumerate(uploads.rows[places]):
            sums.averaged.add_(averaged[chosen] * factors[i])
            sums.loss.add_(losses[i])
            if total.shape[1]:
                sums.total.add_(torch.where(accepted[i][:, None], total[chosen], 0))
        self.accepted.append(merged)

    def _schedule(self, batches: list[int]) -> tuple[Any, Tensor, Tensor]:
        """Order the clients of a chunk as the cohort, trials side by side.

        Returns the trials, the entry that each adds at each step, and its weight; zero: none.
        """
        queues: dict[int, list[tuple[int, float]]] = {}
        for i in sorted(range(len(batches)), key=batches.__getitem__):
            weight = self._weights[batches[i]]
            queue = queues.setdefault(self._batches[batches[i]].trial, [])
            if weight > 0:
                queue.append((i, weight))
        # Batches are sorted by trial, so the trials of a chunk are neighbours.
        trials = slice(min(queues), max(queues) + 1)
        longest = max(len(queue) for queue in queues.values())
        places = np.zeros((longest, trials.stop - trials.start), dtype=np.int64)
        weights = np.zeros(places.shape)
        for trial, queue in queues.items():
            for i, (place, weight) in enumerate(queue):
                places[i, trial - trials.start] = place
                weights[i, trial - trials.start] = weight
        return trials, torch.from_numpy(places), torch.from_numpy(weights)

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
    largest: Tensor = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    return largest


def ratios_to_median(norms: Tensor) -> Tensor:
    """Divide norms (parts x trials x clients) by the median over clients; the largest part counts.

    NaN marks a client without a finite upload. A median of zero, or of few uploads, judges none.
    """
    number = norms.isfinite().sum(-1, keepdim=True)
    middle = torch.cat([(number - 1).clamp(min=0) // 2, number // 2], -1)
    median = norms.sort(-1).values.gather(-1, middle).mean(-1, keepdim=True)
    judged = (number >= FEWEST) & (median > 0)
    return torch.where(judged, norms / median, norms * 0).amax(0)
