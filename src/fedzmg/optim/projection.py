"""Sums over the inputs of a layer, and gradients centred in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
from fedzmg.optim.axes import Axes, inputs, model_layout
from fedzmg.optim.shards import local, splits_inputs, sum_over_processes


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def refuse_sparse(grad: Tensor) -> None:
    """A sparse gradient has no entry to subtract a mean from."""
    if grad.layout is not torch.strided:
        raise InputError(
            f"a gradient of shape {tuple(grad.shape)} is sparse, and minus its mean it is dense: "
            "build the layer with sparse=False, or call grad.to_dense() before the step"
        )


def sum_of_inputs(grad: Tensor, axes: Axes) -> Tensor:
    """Sum over ``axes``, which stay with length one; over all processes if they are split."""
    if splits_inputs(grad, axes):
        return sum_over_processes(grad, axes, wide(grad.dtype))
    return local(grad).sum(dim=axes, keepdim=True, dtype=wide(grad.dtype))


@torch.no_grad()
def centre_(pairs: Iterable[tuple[Tensor, Axes]]) -> None:
    """Subtract from each tensor its mean over its axes, in place."""
    for tensor, axes in pairs:
        refuse_sparse(tensor)
        if axes and tensor.numel():
            total = sum_of_inputs(tensor, axes)
            local(tensor).sub_(total, alpha=1 / inputs(tensor.shape, axes))


def zero_mean_(model: nn.Module, axes: Mapping[str, Axes] | None = None) -> None:
    """Centre the gradients of a model in place: call it between ``backward`` and any ``step``.

    With clipping, clip first and centre afterwards if the step must be zero-mean; with a scaler,
    unscale first only if something else needs it: centring commutes with a factor.

    Args:
        model: any module; parameters without a gradient are passed over.
        axes: input axes of parameters of your own modules, by name.

    >>> layer = nn.Linear(2, 1)
    >>> layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    >>> zero_mean_(layer)
    >>> layer.weight.grad
    tensor([[-1.,  1.]])
    """
    named = dict(model.named_parameters())
    centre_(
        (grad, info.input_axes)
        for name, info in model_layout(model, axes).items()
        if (grad := named[name].grad) is not None
    )
