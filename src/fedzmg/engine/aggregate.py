"""Merge uploads into one cohort per trial.

Sums form a monoid: a cohort can be merged client by client, chunk by chunk or machine by machine.
Uploads are added in the order of the cohort whatever the chunks are, so packing trials together
or splitting a cohort does not move a bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import Cohort, Upload
from fedzmg.data.plan import Entry
from fedzmg.engine.round import Chunk
from fedzmg.tree import leaves, tree_map


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    weighted: tuple[object, object]
    """Weight times (delta, average)."""
    total: object
    weight: Tensor
    clients: Tensor
    """How many uploads were merged."""
    dropped: Tensor
    steps: Tensor
    loss: Tensor


def finite_rows(upload: Upload) -> Tensor:
    """Which rows of stacked uploads hold only finite numbers."""
    flags = [
        leaf.reshape(len(leaf), -1).isfinite().all(1)
        for leaf in leaves(upload)
        if leaf.is_floating_point()
    ]
    return torch.stack(flags).all(0)


def empty(upload: Upload, trials: int) -> Sums:
    """The neutral element for uploads like ``upload`` (stacked), for some trials."""

    def zeros(leaf: Tensor) -> Tensor:
        dtype = leaf.dtype if leaf.is_floating_point() else torch.float32
        return torch.zeros(trials, *leaf.shape[1:], dtype=dtype, device=leaf.device)

    some = leaves(upload)[0]
    count = torch.zeros(trials, dtype=torch.int64, device=some.device)
    real = count.double()
    return Sums(
        weighted=tree_map(zeros, (upload.delta, upload.average)),
        total=tree_map(zeros, upload.total),
        weight=real,
        clients=count,
        dropped=count.clone(),
        steps=count.clone(),
        loss=real.clone(),
    )


def add(
    sums: Sums | None, chunk: Chunk, entries: list[Entry], weights: Tensor, trials: int
) -> Sums:
    """Add a chunk's uploads to the sums, in place; rows that are not finite count as dropped.

    Args:
        sums: what was merged before, or None.
        chunk: outcomes of some entries.
        entries: all entries of the round.
        weights: weight of every entry, zero for clients that hold no batch.
        trials: number of trials.
    """
    outcome = chunk.outcomes
    upload = outcome.upload
    if sums is None:
        sums = empty(upload, trials)
    device = sums.clients.device
    finite = finite_rows(upload)
    taken = torch.tensor(chunk.entries, device=device)
    rows = torch.tensor(chunk.rows, device=device)
    sent = weights[taken] > 0
    good = finite[rows] & sent
    weight = torch.where(good, weights[taken], 0.0)
    # Wave by wave: at most one client per trial at a time, in the order of the cohort.
    for wave in _waves([entries[i].trial for i in chunk.entries], chunk.entries):
        pick = torch.tensor(wave, device=device)
        trial = torch.tensor([entries[chunk.entries[i]].trial for i in wave], device=device)
        _add_wave(sums, outcome.upload, rows[pick], trial, weight[pick], good[pick])
        sums.dropped.index_add_(0, trial, (~finite[rows[pick]] & sent[pick]).long())
        sums.steps.index_add_(0, trial, outcome.steps[rows[pick]])
        losses = torch.where(good[pick], outcome.loss[rows[pick]].double(), 0.0)
        sums.loss.index_add_(0, trial, losses)
    return sums


def _waves(trials: list[int], entries: list[int]) -> list[list[int]]:
    """Positions in the chunk, grouped so that each group holds a trial at most once, in order."""
    waves: list[list[int]] = []
    seen: dict[int, int] = {}
    for i in sorted(range(len(entries)), key=entries.__getitem__):
        turn = seen.get(trials[i], 0)
        seen[trials[i]] = turn + 1
        if turn == len(waves):
            waves.append([])
        waves[turn].append(i)
    return waves


def _add_wave(
    sums: Sums, upload: Upload, rows: Tensor, trial: Tensor, weight: Tensor, good: Tensor
) -> None:
    def along(flags: Tensor, like: Tensor) -> Tensor:
        return flags.reshape(-1, *[1] * (like.ndim - 1))

    def add_to(total: Tensor, leaf: Tensor, factor: Tensor | None) -> None:
        part = leaf[rows].to(total.dtype)
        if factor is not None:
            part = part * along(factor.to(total.dtype), part)
        total.index_add_(0, trial, torch.where(along(good, part), part, 0))

    for total, leaf in zip(
        leaves(sums.weighted), leaves((upload.delta, upload.average)), strict=True
    ):
        add_to(total, leaf, weight)
    for total, leaf in zip(leaves(sums.total), leaves(upload.total), strict=True):
        add_to(total, leaf, None)
    sums.weight.index_add_(0, trial, weight)
    sums.clients.index_add_(0, trial, good.long())


def cohort(sums: Sums, population: int, round_: Tensor) -> Cohort:
    """Averages and totals of every trial; a trial that lost every upload gets zeros."""
    safe = torch.where(sums.weight > 0, sums.weight, 1.0)

    def mean(leaf: Tensor) -> Tensor:
        return leaf / safe.reshape(-1, *[1] * (leaf.ndim - 1)).to(leaf.dtype)

    delta, average = tree_map(mean, sums.weighted)
    people = torch.full_like(sums.clients, population)
    return Cohort(delta, average, sums.total, sums.clients, people, round_)
