"""Parameters that are spread over processes (FSDP2, tensor parallelism).

A mean over an axis that no process has alone needs a sum over processes; everything else of a step
works on the local part. DTensors are known by what they can do, so that nothing distributed is
imported for models that live in one place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is one process's view of a tensor spread over several."""
    # Asking a plain tensor for what it has not is slow; a step asks for all of a model's.
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; it shares memory with it."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    part: Tensor = spread.to_local()
    return part


def like_its_parameter(grad: Tensor, parameter: Tensor) -> Tensor:
    """A gradient spread as its parameter is."""
    if is_spread(parameter) and is_spread(grad):
        wanted: Any = parameter
        given: Any = grad
        if given.placements != wanted.placements:
            return given.redistribute(placements=wanted.placements)  # type: ignore[no-any-return]
    elif is_spread(parameter) or is_spread(grad):
        raise InputError(
            "a parameter and its gradient are not spread over processes alike "
            f"({type(parameter).__name__}, {type(grad).__name__}): shard the model before training"
        )
    return grad


def splits_inputs(parameter: Tensor, axes: Axes) -> bool:
    """Whether entries that share a mean lie on different processes."""
    if not axes or not is_spread(parameter):
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
