"""Batch normalisation of one client as an operator with a rule for mapping it over clients."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.library import custom_op

from fedzmg.kernels.precision import clients_first, suits_kernels, within_reach


def available(x: Tensor) -> bool:
    """Tell whether our kernels can normalise these images or vectors of mapped clients."""
    if torch.compiler.is_compiling() or maybe_current_level() is None:
        return False  # the compiler fuses single operations with their neighbours
    return x.ndim in (2, 4) and suits_kernels(x)


@custom_op("fedzmg::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise by the statistics of the real examples; also return moved running statistics."""
    raise NotImplementedError("for mapped clients alone")


@batch_norm.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
    size, pairs = info.batch_size, zip(inputs[:6], in_dims, strict=False)
    x, *own = (t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs)
    images = x if x.ndim == 5 else x[..., None, None]
    out, _, _, mean, var = clients_batch_norm(images, *own, *inputs[6:])
    return (out if x.ndim == 5 else out.flatten(2), mean, var), (0, 0, 0)


@custom_op("fedzmg::clients_batch_norm", mutates_args=())
def clients_batch_norm(
    x: Tensor, real: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise ``[clients, batch, ...]``: outputs, means, scales, moved running statistics."""
    from fedzmg.kernels import triton_norm

    own = [part.contiguous() for part in (weight, bias, mean, var)]
    return triton_norm.forward(_dense(x), real.contiguous().view(torch.uint8), own, momentum, eps)


def _dense(x: Tensor) -> Tensor:
    return within_reach(x) if torch.empty_like(x).stride() == x.stride() else x.contiguous()


@custom_op("fedzmg::clients_batch_norm_back", mutates_args=())
def clients_batch_norm_back(
    x: Tensor, signal: Tensor, real: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of images, weights and biases."""
    from fedzmg.kernels import triton_norm

    own = weight.contiguous(), means, scales
    return triton_norm.backward(
        _dense(x), within_reach(signal), real.contiguous().view(torch.uint8), *own
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, real, weight, *_ = inputs
    ctx.save_for_backward(x, real, weight, *output[1:3])


def _backward(ctx: Any, signal: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    x, *rest = ctx.saved_tensors
    for_x, for_weight, for_bias = clients_batch_norm_back(x, signal, *rest)
    return for_x, None, for_weight, for_bias, None, None, None, None


clients_batch_norm.register_autograd(_backward, setup_context=_setup_context)
