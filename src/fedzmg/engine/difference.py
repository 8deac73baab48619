"""Add clients' models to the sums of a trial on a CPU, in few operations or in one sweep.

:class:`~fedzmg.engine.aggregate.Merger` does the same for any upload, device and number of trials.
A model that is larger than a cache is read once: its difference from the global one is not stored.
"""

from math import isfinite, nan

import torch
from torch import Tensor

from fedzmg.engine.local import Chunk
from fedzmg.engine.sums import Sums
from fedzmg.tree import Tree

LARGE = 1 << 17  # values above which a model is larger than a cache


def add_models(
    sums: Sums, spare: Tensor, chunk: Chunk, weights: list[float]
) -> tuple[Sums, Tensor, Tensor]:
    """Add the models of a chunk to sums, each with a weight; a weight of zero means no upload.

    Returns the sums, losses and norms by client (NaN if it does not count), and who counts. Sums of
    a large model are written to ``spare``, and left there if a value is not finite.
    """
    params, origin = chunk.outcomes.upload.delta, chunk.origin
    assert origin is not None
    factors = torch.tensor(weights, dtype=spare.dtype)
    large, rows = len(weights) == 1 and len(spare) > LARGE, spare
    if large:
        norms = [float(weighted_sum(sums.averaged[0], spare, origin, params, factors[0]))]
    else:
        flat = torch.cat([params[name].reshape(len(weights), -1) for name in origin], 1)
        rows = torch.cat([leaf.reshape(-1) for leaf in origin.values()]) - flat
        norms = largest(rows).tolist()
    counts = [w > 0 and isfinite(norm) for w, norm in zip(weights, norms, strict=True)]
    losses, steps = chunk.outcomes.loss.tolist(), chunk.outcomes.steps.tolist()
    for i in [i for i, flag in enumerate(counts) if flag]:
        if large:
            sums = sums._replace(averaged=spare[None])
        else:
            sums.averaged.add_(rows[i].mul_(factors[i]))
        sums.loss.add_(losses[i])
    sums.weight.add_(sum(w for w, flag in zip(weights, counts, strict=True) if flag))
    sums.clients.add_(sum(counts))
    sums.dropped.add_(sum(w > 0 for w in weights) - sum(counts))
    sums.steps.add_(sum(n for n, flag in zip(steps, counts, strict=True) if flag))
    known = [[v if f else nan for v, f in zip(own, counts, strict=True)] for own in (losses, norms)]
    return sums, torch.tensor(known, dtype=torch.float64), torch.tensor(counts)


def weighted_sum(
    before: Tensor, after: Tensor, origin: Tree, params: Tree, weight: Tensor
) -> Tensor:
    """Write ``before + weight * (origin - params)`` to ``after``, both flat.

    Returns the largest absolute value of the difference; it is not finite if any value is not.
    """
    sizes, extremes = [leaf.numel() for leaf in origin.values()], []
    parts = (torch.split(flat, sizes) for flat in (before, after))
    for name, old, new in zip(origin, *parts, strict=True):
        if len(new):
            moved = origin[name].reshape(-1) - params[name].reshape(-1)
            extremes += [moved.amax(), -moved.amin()]
            torch.add(old, moved.mul_(weight), out=new)
    return torch.stack(extremes).amax()


def largest(rows: Tensor) -> Tensor:
    """Compute the largest absolute value of every row; NaN if the row has one."""
    if not rows.is_cuda:  # the norm is five times slower there
        return torch.maximum(rows.amax(1), -rows.amin(1))
    found: Tensor = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    return found
