"""Sums over the clients of a cohort, the models that enter them, and outliers among these."""

from collections.abc import Iterator
from math import isfinite, nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.engine.local import Chunk
from fedzmg.messages import Upload
from fedzmg.tree import BLOCK, State

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


def add_models(sums: Sums, chunk: Chunk, weights: list[float]) -> tuple[Sums, Tensor, Tensor]:
    """Add the models of a chunk to sums, each with a weight; a weight of zero means no upload.

    Returns the sums, losses and norms by client (NaN if it does not count), and who counts.
    """
    sent = [w > 0 for w in weights]
    averaged, norms = _add_counted(sums.averaged, chunk, weights, sent)
    counts = [flag and isfinite(norm) for flag, norm in zip(sent, norms, strict=True)]
    if counts != sent:  # which is rare
        averaged, _ = _add_counted(sums.averaged, chunk, weights, counts)
    losses, steps = chunk.outcomes.loss.tolist(), chunk.outcomes.steps.tolist()
    for i in [i for i, flag in enumerate(counts) if flag]:
        sums.loss.add_(losses[i])
    sums.weight.add_(sum(w for w, flag in zip(weights, counts, strict=True) if flag))
    sums.clients.add_(sum(counts))
    sums.dropped.add_(sum(sent) - sum(counts))
    sums.steps.add_(sum(n for n, flag in zip(steps, counts, strict=True) if flag))
    known = [[v if f else nan for v, f in zip(own, counts, strict=True)] for own in (losses, norms)]
    facts = torch.tensor(known, dtype=torch.float64)
    return sums._replace(averaged=averaged), facts, torch.tensor(counts)


def _add_counted(
    before: Tensor, chunk: Chunk, weights: list[float], counts: list[bool]
) -> tuple[Tensor, list[float]]:
    """Return new sums of models that count, and the norms of all of them."""
    # On one thread NumPy is faster, in blocks that stay in the cache.
    alone = torch.get_num_threads() == 1 and before.dtype in (torch.float32, torch.float64)
    library: Any = np if alone else torch
    after, norms, first = torch.empty_like(before), [], 0
    width = min(BLOCK, before.shape[1]) if alone else before.shape[1]
    spare = torch.empty(len(weights), width, dtype=before.dtype)
    factors = torch.tensor(weights, dtype=before.dtype)
    chosen = [i for i, flag in enumerate(counts) if flag]
    with np.errstate(over="ignore", invalid="ignore"):
        for sent, own in _groups(chunk):
            tensors = sent, own, before[0, first:], after[0, first:], factors, spare
            start, models, old, new, scales, room = (t.numpy() if alone else t for t in tensors)
            for low in range(0, len(sent), width):
                part = slice(low, min(low + width, len(sent)))
                rows = room[:, : part.stop - low]
                library.subtract(start[part], models[:, part], out=rows)
                norms.append((_largest_of if alone else largest)(rows))
                total, out = old[part], new[part]
                for i in chosen:
                    library.multiply(rows[i], scales[i], out=rows[i])
                    total = library.add(total, rows[i], out=out)
            first += len(sent)
    every = np.stack(norms).max(0) if alone else torch.stack(norms).amax(0)
    return after if chosen else before, every.tolist()


def _groups(chunk: Chunk) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the global model and of a chunk's, flat; small tensors together."""
    models, origin = chunk.outcomes.upload.delta, chunk.origin
    assert origin is not None
    groups: list[list[str]] = []
    room = 0
    for name, leaf in origin.items():
        room -= leaf.numel()
        if room < 0 or not groups:
            groups.append([])
            room = BLOCK - leaf.numel()
        groups[-1].append(name)
    for names in groups:
        sent = [origin[name].reshape(-1) for name in names]
        own = [models[name].reshape(len(chunk.rows), -1) for name in names]
        yield (sent[0], own[0]) if len(names) == 1 else (torch.cat(sent), torch.cat(own, 1))


def _largest_of(rows: Any) -> Any:
    """Compute the same of a NumPy array."""
    return np.maximum(rows.max(1), -rows.min(1))


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
