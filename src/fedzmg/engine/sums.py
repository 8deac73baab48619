"""Sums over the clients of a cohort, and outliers among their uploads."""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import isfinite, nan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.engine.local import Chunk
from fedzmg.messages import Upload
from fedzmg.tree import State

OUTLIER = 100.0  # norm of an outlier over the median of its cohort, at least
FEWEST = 3  # uploads that a cohort needs for its median to judge any of them
FEW_PARTS = 8  # of models that one thread adds as fast as several


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


def add_models(sums: Sums, chunk: Chunk, weights: list[float]) -> tuple[Tensor, Tensor] | None:
    """Add models to sums in the order of the cohort; a weight of 0: no upload.

    Returns losses and norms by client, and who counts; None if a model is not finite.
    """
    assert chunk.models is not None
    (rows, origin), clients = chunk.models, len(weights)
    order = sorted(range(clients), key=chunk.batches.__getitem__)
    counted = [i for i in order if weights[i] > 0]
    ends = [*accumulate(map(len, origin))]
    models, sum_, begins = rows.numpy(), sums.averaged[0].numpy(), not any(sums.clients.tolist())
    before = None if begins else sums.averaged.clone()
    number = torch.get_num_threads() if len(origin) > FEW_PARTS else 1

    def add(share: int) -> list[float]:
        """Add parts of all models, which stay in the cache; NumPy starts faster than torch."""
        spare, found = np.empty(max(map(len, origin)), models.dtype), [0.0] * clients
        with np.errstate(all="ignore"):  # the largest value shows if one is not finite
            for end, part in zip(ends[share::number], origin[share::number], strict=True):
                start, here = part.numpy(), slice(end - len(part), end)
                for i in counted:
                    first = begins and i == counted[0]
                    moved = sum_[here] if first else spare[: len(start)]
                    np.subtract(start, models[i, here], out=moved)
                    found[i] = np.maximum(found[i], max(moved.max(), -moved.min()))
                    np.multiply(moved, weights[i], out=moved)
                    if not first:
                        sum_[here] += moved
        return found

    if number == 1:
        found = [add(0)]
    else:
        with ThreadPoolExecutor(number) as pool:
            found = list(pool.map(add, range(number)))
    norms, losses = np.maximum.reduce(found).tolist(), chunk.outcomes.loss.tolist()
    if not all(isfinite(norms[i]) for i in counted):
        sums.averaged.copy_(torch.zeros(()) if before is None else before)
        return None
    for i in counted:
        sums.loss.add_(losses[i])
    sums.weight.add_(sum(weights))
    sums.clients.add_(len(counted))
    sums.steps.add_(sum(map(chunk.outcomes.steps.tolist().__getitem__, counted)))
    counts = [weight > 0 for weight in weights]
    facts = [[own[i] if c else nan for i, c in enumerate(counts)] for own in (losses, norms)]
    return torch.tensor(facts, dtype=torch.float64), torch.tensor(counts)


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
    return torch.where((number >= FEWEST) & (median > 0), norms / median, norms * 0).amax(0)
