"""Merge uploads into one cohort per trial.

Sums form a monoid: a cohort can be merged client by client, chunk by chunk or machine by machine.
Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort does not move a bit. Every upload is one flat row while it is merged: a few
operations on one matrix instead of many on every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import Cohort
from fedzmg.data.plan import Entry
from fedzmg.engine.round import Chunk
from fedzmg.tree import Flat, flatten_rows, unflatten_rows


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    averaged: Tensor
    """Weight times (delta, average), flat."""
    total: Tensor
    weight: Tensor
    clients: Tensor
    """How many uploads were merged."""
    dropped: Tensor
    """How many were refused because they were not finite."""
    steps: Tensor
    loss: Tensor

    @classmethod
    def empty(cls, averaged: Tensor, total: Tensor, trials: int) -> Sums:
        """The neutral element for rows like these."""
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


class Merger:
    """Adds the uploads of one round, chunk by chunk."""

    def __init__(self, entries: list[Entry], weights: list[float], trials: int) -> None:
        self._entries, self._weights, self._trials = entries, weights, trials
        self._sums: Sums | None = None
        self._forms: tuple[Flat, Flat] | None = None

    def add(self, chunk: Chunk) -> Tensor:
        """Merge a chunk; which of its entries were accepted, as a tensor.

        An upload with a value that is not finite is dropped and counted. An entry of weight zero
        (a client that held no batch) sent nothing. Nothing here waits for the device.
        """
        upload = chunk.outcomes.upload
        averaged, form = flatten_rows((upload.delta, upload.average))
        total, total_form = flatten_rows(upload.total, like=averaged)
        if self._sums is None:
            self._sums = Sums.empty(averaged, total, self._trials)
            self._forms = form, total_form
        finite = averaged.isfinite().all(1) & total.isfinite().all(1)
        # Zero times a value that is not finite is not zero, so such a row is blanked first.
        averaged = torch.where(finite[:, None], averaged, 0)
        total = torch.where(finite[:, None], total, 0)
        for wave in self._waves(chunk):
            self._add_wave(self._sums, averaged, total, finite, chunk, wave)
        sent = torch.tensor([self._weights[i] > 0 for i in chunk.entries])
        return finite[self._index(chunk.rows, finite)] & sent.to(finite.device)

    def _waves(self, chunk: Chunk) -> list[list[int]]:
        """Positions in the chunk in the order of the cohort, at most one per trial in a wave."""
        waves: list[list[int]] = []
        turns: dict[int, int] = {}
        for place in sorted(range(len(chunk.entries)), key=chunk.entries.__getitem__):
            if self._weights[chunk.entries[place]] > 0:
                trial = self._entries[chunk.entries[place]].trial
                turn = turns[trial] = turns.get(trial, -1) + 1
                if turn == len(waves):
                    waves.append([])
                waves[turn].append(place)
        return waves

    @staticmethod
    def _index(values: list[int], like: Tensor) -> Tensor:
        return torch.tensor(values).to(like.device, non_blocking=True)

    def _add_wave(
        self,
        sums: Sums,
        averaged: Tensor,
        total: Tensor,
        finite: Tensor,
        chunk: Chunk,
        wave: list[int],
    ) -> None:
        owners = [chunk.entries[place] for place in wave]
        rows = self._index([chunk.rows[place] for place in wave], averaged)
        trial = self._index([self._entries[i].trial for i in owners], averaged)
        given = torch.tensor([self._weights[i] for i in owners], dtype=torch.float64)
        fine = finite[rows]
        weight = torch.where(fine, given.to(averaged.device, non_blocking=True), 0.0)
        factor = weight.to(averaged.dtype)[:, None]
        sums.averaged.index_add_(0, trial, averaged[rows] * factor)
        if total.shape[1]:
            sums.total.index_add_(0, trial, total[rows])
        sums.weight.index_add_(0, trial, weight)
        sums.clients.index_add_(0, trial, fine.long())
        sums.dropped.index_add_(0, trial, (~fine).long())
        sums.steps.index_add_(0, trial, torch.where(fine, chunk.outcomes.steps[rows], 0))
        loss = torch.where(fine, chunk.outcomes.loss[rows].double(), 0.0)
        sums.loss.index_add_(0, trial, loss)

    @property
    def sums(self) -> Sums:
        """Everything merged so far."""
        assert self._sums is not None, "a round has at least one chunk"
        return self._sums

    def cohort(self, population: int, round_: Tensor) -> Cohort:
        """Averages and totals of every trial; a trial that lost every upload gets zeros."""
        assert self._forms is not None
        sums = self.sums
        weight = torch.where(sums.weight > 0, sums.weight, 1.0).to(sums.averaged.dtype)
        delta, average = unflatten_rows(sums.averaged / weight[:, None], self._forms[0])
        total = unflatten_rows(sums.total, self._forms[1])
        people = torch.full_like(sums.clients, population)
        return Cohort(delta, average, total, sums.clients, people, round_)
