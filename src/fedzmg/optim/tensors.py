"""Memory layout of tensors, shards over processes (FSDP2, tensor parallelism), and centring.

Kernels walk addresses, not indices, so strides matter. A mean over a sharded axis needs a sum over
processes; everything else of a step works on the local part. DTensors are recognised by their
attributes, so that nothing distributed is imported for models in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes, inputs, model_axes, warn_of_single_inputs


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
    part: Any = tensor
    return part.to_local() if is_sharded(tensor) else tensor


def sharded_like(grad: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient that is sharded as its parameter is."""
    if is_sharded(parameter) != is_sharded(grad):
        raise InputError(
            "a parameter and its gradient are not sharded alike "
            f"({type(parameter).__name__}, {type(grad).__name__}): shard the model before training"
        )
    wanted: Any = parameter
    given: Any = grad
    if is_sharded(parameter) and given.placements != wanted.placements:
        given = given.redistribute(placements=wanted.placements)
    return given  # type: ignore[no-any-return]


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


def dense(grad: Tensor, axes: Axes) -> Tensor:
    """Return a dense gradient; reject a sparse one that has to be centred."""
    if grad.layout is torch.strided:
        return grad
    if axes:
        raise InputError(
            f"a gradient of shape {tuple(grad.shape)} is sparse, and minus its mean it is dense: "
            "build the layer with sparse=False, call grad.to_dense() before the step, or leave the "
            "weight uncentred with axes ()"
        )
    return grad.to_dense()


def sum_of_inputs(grad: Tensor, axes: Axes) -> Tensor:
    """Sum over ``axes``, which stay with length one; over all processes if they are split.

    If they are, every process calls this in the same order.
    """
    if inputs_sharded(grad, axes):
        from torch.distributed.tensor import Replicate

        part: Any = _sum(grad, axes)
        whole = [Replicate() if p.is_partial() else p for p in part.placements]
        return part.redistribute(placements=whole).to_local()  # type: ignore[no-any-return]
    if torch.compiler.is_compiling() and grad.device.type == "cpu":
        total: Tensor = _opaque_sum(local(grad), axes)
        return total
    return _sum(local(grad), axes)


def _sum(grad: Tensor, axes: Axes) -> Tensor:
    wide = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    return grad.sum(dim=axes, keepdim=True, dtype=wide)


# Inductor of torch 2.13 fails on CPUs (KeyError: 'buf2') when it fuses a sum with the in-place
# updates of velocity and weight after it. It does not look into an operator of our own.
_opaque_sum = torch.library.custom_op(
    "fedzmg::sum_of_inputs", _sum, mutates_args=(), schema="(Tensor grad, int[] axes) -> Tensor"
)
_opaque_sum.register_fake(_sum)


@torch.no_grad()
def centre_(pairs: Iterable[tuple[Tensor, Axes]]) -> None:
    """Subtract from each tensor its mean over its axes, in place."""
    for tensor, axes in pairs:
        if axes and tensor.numel():
            total = sum_of_inputs(dense(tensor, axes), axes)
            local(tensor).sub_(total, alpha=1 / inputs(tensor.shape, axes))


def zero_mean_(model: nn.Module, axes: Mapping[str, Axes] | None = None) -> None:
    """Centre the gradients of a model in place: call it between ``backward`` and any ``step``.

    With clipping, clip first and centre afterwards if the step must be zero-mean; with a scaler,
    unscale first only if something else needs it: centring commutes with a factor.

    Args:
        model: any module; parameters without a gradient are skipped.
        axes: input axes of parameters of your own modules, by name.

    >>> layer = nn.Linear(2, 1)
    >>> layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    >>> zero_mean_(layer)
    >>> layer.weight.grad
    tensor([[-1.,  1.]])
    """
    known = model_axes(model, axes)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    warn_of_single_inputs((names[p], p, over) for p, over in known.items())
    centre_((p.grad, over) for p, over in known.items() if p.grad is not None)
