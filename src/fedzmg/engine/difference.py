"""Add clients' models to the sums of a trial on a CPU, in few operations.

:class:`~fedzmg.engine.aggregate.Merger` does the same for any upload, device and number of trials.
"""

from math import isfinite, nan

import torch
from torch import Tensor

from fedzmg.engine.local import Chunk
from fedzmg.engine.norms import largest
from fedzmg.engine.sums import Sums


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
