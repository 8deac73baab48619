"""Sums over the clients of a cohort, the models that enter them, and outliers among these."""

from math import isfinite, nan
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.engine.local import Chunk
from fedzmg.messages import Upload
from fedzmg.tree import State

OUTLIER = 100.0  # norm of an outlier over the median of its cohort, at least
FEWEST = 3  # uploads that a cohort needs for its median to judge any of them


class Sums(NamedTuple):
    """Sums over clients, one row per trial."""

    averaged: Tensor  # weight times (delta, average), flat
    total: Tensor
    weight: Tensor
    clients: Tensor  # uploads merged
    dropped: Tensor  # uploads rejected: not finite, outliers, or too few for an aggregator
    steps: Tensor
    loss: Tensor


class MergedPart(NamedTuple):
    """Merged uploads of some clients of a cohort, and what is known of each."""

    sums: Sums
    upload: Upload  # upload of one client, for its size
    order: list[int]
    facts: list[Tensor]
    each: list[State]
    accepted: list[Tensor]
    computed: int


def add_models(sums: Sums, chunk: Chunk, weights: list[float]) -> tuple[Tensor, Tensor]:
    """Add the models of a chunk to sums, each with a weight; a weight of zero means no upload.

    Returns losses and norms by client (NaN if it does not count), and who counts.
    """
    params, origin = chunk.outcomes.upload.delta, chunk.origin
    assert origin is not None
    models = torch.cat([params[name].reshape(len(weights), -1) for name in origin], 1)
    rows = torch.cat([leaf.reshape(-1) for leaf in origin.values()]) - models
    norms, factors = largest(rows).tolist(), torch.tensor(weights, dtype=rows.dtype)
    counts = [w > 0 and isfinite(norm) for w, norm in zip(weights, norms, strict=True)]
    losses, steps = chunk.outcomes.loss.tolist(), chunk.outcomes.steps.tolist()
    for i in [i for i, flag in enumerate(counts) if flag]:
        sums.averaged.add_(rows[i].mul_(factors[i]))
        sums.loss.add_(losses[i])
    sums.weight.add_(sum(w for w, flag in zip(weights, counts, strict=True) if flag))
    sums.clients.add_(sum(counts))
    sums.dropped.add_(sum(w > 0 for w in weights) - sum(counts))
    sums.steps.add_(sum(n for n, flag in zip(steps, counts, strict=True) if flag))
    known = [[v if f else nan for v, f in zip(own, counts, strict=True)] for own in (losses, norms)]
    return torch.tensor(known, dtype=torch.float64), torch.tensor(counts)


def largest(rows: Tensor) -> Tensor:
    """Compute the largest absolute value of every row; NaN if the row has one."""
    if not rows.is_cuda:  # the norm is five times slower there
        return torch.maximum(rows.amax(1), -rows.amin(1))
    return torch.linalg.vector_norm(rows, float("inf"), dim=1)  # type: ignore[no-any-return]


def ratios_to_median(norms: Tensor) -> Tensor:
    """Divide norms (parts x trials x clients) by the median over clients; the largest part counts.

    NaN marks a client without a finite upload. A median of zero, or of few uploads, judges none.
    """
    number = norms.isfinite().sum(-1, keepdim=True)
    middle = torch.cat([(number - 1).clamp(min=0) // 2, number // 2], -1)
    median = norms.sort(-1).values.gather(-1, middle).mean(-1, keepdim=True)
    judged = (number >= FEWEST) & (median > 0)
    return torch.where(judged, norms / median, norms * 0).amax(0)
