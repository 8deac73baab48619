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

    def add(self, chunk: Chunk) -> list[bool]:
        """Merge a chunk; which of its entries were accepted.

        An upload with a value that is not finite is dropped and counted. An entry of weight zero
        (a client that held no batch) sent nothing.
        """
        upload = chunk.outcomes.upload
        averaged, form = flatten_rows((upload.delta, upload.average))
        total, total_form = flatten_rows(upload.total, like=averaged)
        if self._sums is None:
            self._sums = Sums.empty(averaged, total, self._trials)
            self._forms = form, total_form
        finite = averaged.isfinite().all(1) & total.isfinite().all(1)
        flags = finite[chunk.rows].tolist()
        accepted = [ok and self._weights[i] > 0 for ok, i in zip(flags, chunk.entries, strict=True)]
        for wave in self._waves(chunk, accepted):
            self._add_wave(self._sums, averaged, total, chunk, wave)
        for i, ok in zip(chunk.entries, flags, strict=True):
            if not ok and self._weights[i] > 0:
                self._sums.dropped[self._entries[i].trial] += 1
        return accepted

    def _waves(self, chunk: Chunk, accepted: list[bool]) -> list[list[int]]:
        """Positions in the chunk in the order of the cohort, at most one per trial in a wave."""
        waves: list[list[int]] = []
        turns: dict[int, int] = {}
        for place in sorted(range(len(chunk.entries)), key=chunk.entries.__getitem__):
            if accepted[place]:
                trial = self._entries[chunk.entries[place]].trial
                turn = turns[trial] = turns.get(trial, -1) + 1
                if turn == len(waves):
                    waves.append([])
                waves[turn].append(place)
        return waves

    def _add_wave(
        self, sums: Sums, averaged: Tensor, total: Tensor, chunk: Chunk, wave: list[int]
    ) -> None:
        device = averaged.device
        owners = [chunk.entries[place] for place in wave]
        rows = torch.tensor([chunk.rows[place] for place in wave], device=device)
        trial = torch.tensor([self._entries[i].trial for i in owners], device=device)
        weight = torch.tensor(
            [self._weights[i] for i in owners], dtype=torch.float64, device=device
        )
        factor = weight.to(averaged.dtype)[:, None]
        sums.averaged.index_add_(0, trial, averaged[rows] * factor)
        if total.shape[1]:
            sums.total.index_add_(0, trial, total[rows])
        sums.weight.index_add_(0, trial, weight)
        sums.clients.index_add_(0, trial, torch.ones_like(trial))
        sums.steps.index_add_(0, trial, chunk.outcomes.steps[rows])
        sums.loss.index_add_(0, trial, chunk.outcomes.loss[rows].double())

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
