"""Uploads whose norm is far from that of their cohort's others."""

import torch
from torch import Tensor

OUTLIER = 100.0  # norm of an outlier over the median of its cohort, at least
FEWEST = 3  # uploads that a cohort needs for its median to judge any of them


def ratios_to_median(norms: Tensor) -> Tensor:
    """Divide norms (parts x trials x clients) by the median over clients; the largest part counts.

    NaN marks a client without a finite upload. A median of zero, or of few uploads, judges none.
    """
    number = norms.isfinite().sum(-1, keepdim=True)
    middle = torch.cat([(number - 1).clamp(min=0) // 2, number // 2], -1)
    median = norms.sort(-1).values.gather(-1, middle).mean(-1, keepdim=True)
    judged = (number >= FEWEST) & (median > 0)
    return torch.where(judged, norms / median, norms * 0).amax(0)
