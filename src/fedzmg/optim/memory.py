"""How tensors lie in memory: kernels walk addresses, not indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills a stretch of memory, in whatever order of its axes."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether equal indices of two tensors of one shape lie equally far from their beginnings."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def laid_like(tensor: Tensor, model: Tensor) -> Tensor:
    """The tensor itself or a copy that lies as ``model`` does."""
    return tensor if alike(tensor, model) else torch.empty_like(model).copy_(tensor)
