"""Sums over the inputs of a layer, and gradients centred in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes, inputs, model_axes, warn_of_single_inputs
from fedzmg.optim.tensors import inputs_sharded, local, sum_over_processes


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


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
    """Sum over ``axes``, which stay with length one; over all processes if they are split."""
    if inputs_sharded(grad, axes):
        return sum_over_processes(grad, axes, wide(grad.dtype))
    if torch.compiler.is_compiling() and grad.device.type == "cpu":
        total: Tensor = _opaque_sum(local(grad), axes)
        return total
    return _sum(local(grad), axes)


def _sum(grad: Tensor, axes: Axes) -> Tensor:
    return grad.sum(dim=axes, keepdim=True, dtype=wide(grad.dtype))


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
