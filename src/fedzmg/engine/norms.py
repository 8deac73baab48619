"""Norms of uploads, and outliers: uploads far from the others of their cohort."""

import torch
from torch import Tensor

OUTLIER = 100.0  # norm of an outlier over the median of its cohort, at least
FEWEST = 3  # uploads that a cohort needs for its median to judge any of them


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
