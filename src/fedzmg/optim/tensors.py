"""Memory layout of tensors, and tensors sharded over processes (FSDP2, tensor parallelism).

Kernels walk addresses, not indices, so strides matter. A mean over a sharded axis needs a sum over
processes; everything else of a step works on the local part. DTensors are recognised by their
attributes, so that nothing distributed is imported for models in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes


def without_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Check that a tensor fills a block of memory, in any order of its axes."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def alike(one: Tensor, other: Tensor) -> bool:
    """Check that equal indices of two tensors of one shape have equal offsets in memory."""
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def with_strides_of(tensor: Tensor, model: Tensor) -> Tensor:
    """Return the tensor, or a copy with the strides of ``model``."""
    return tensor if alike(tensor, model) else torch.empty_like(model).copy_(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Check whether a tensor is sharded over processes."""
    # hasattr is slow for missing attributes, and a step asks for every parameter.
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    spread: Any = tensor
    part: Tensor = spread.to_local()
    return part


def sharded_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that is sharded as its parameter is."""
    if is_sharded(parameter) and is_sharded(grad):
        wanted: Any = parameter
        given: Any = grad
        if given.placements != wanted.placements:
            return given.redistribute(placements=wanted.placements)  # type: ignore[no-any-return]
    elif is_sharded(parameter) or is_sharded(grad):
        raise InputError(
            "a parameter and its gradient are not sharded alike "
            f"({type(parameter).__name__}, {type(grad).__name__}): shard the model before training"
        )
    return grad


def inputs_sharded(parameter: Tensor, axes: Axes) -> bool:
    """Check whether entries that share a mean are on different processes."""
    if not axes or not is_sharded(parameter):
        return False
    spread: Any = parameter
    for placement in spread.placements:
        if placement.is_partial():
            raise InputError("a parameter is a partial sum over processes: its mean is not known")
        if placement.is_shard() and placement.dim % parameter.ndim in axes:
            return True
    return False


def sum_over_processes(grad: Tensor, axes: Axes, wide: Any) -> Tensor:
    """Sum over axes that are split between processes; every process calls this, in one order."""
    from torch.distributed.tensor import Replicate

    total: Any = grad.sum(dim=axes, keepdim=True, dtype=wide)
    whole = [Replicate() if p.is_partial() else p for p in total.placements]
    summed: Tensor = total.redistribute(placements=whole).to_local()
    return summed
