"""Forms of layers, whose choice changes speed and the last bits, never the result.

Each was found by measurement on small models (``benchmarks/engines.py``):

* A dense layer mapped over clients is computed as ``(W xᵀ)ᵀ``. The gradient of ``W`` then comes
  out in the layout of ``W`` itself, and every later pass over it runs at full speed.
* oneDNN prepares some matrix products anew at every call. On ARM that costs about 0.6 ms each,
  forty times what a small product itself takes; without it torch falls back to plain BLAS.
* Without oneDNN, convolutions whose weights differ between clients run as one product of unfolded
  patches; torch's own fallback loops over clients.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.mkldnn import set_flags
from torch.library import custom_op
from torch.overrides import TorchFunctionMode

from fedzmg.models.kernels import convolution
from fedzmg.models.kernels.precision import HAS_TRITON, clients_first, precision

MAX_BATCH = 64
"""Larger batches do not fit in one tile of our GRU kernels."""
ONEDNN_BY_DEFAULT = platform.machine().lower() not in ("aarch64", "arm64")


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Turn oneDNN's CPU kernels on or off inside a ``with`` block."""
    before, *_ = set_flags(enabled, _fp32_precision=None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_flags(before, _fp32_precision=None)  # type: ignore[no-untyped-call]


class MappedLayers(TorchFunctionMode):
    """Mode that computes layers in the fast form for weights that differ between clients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace dense layers and convolutions; leave everything else."""
        return _SWAPS.get(func, func)(*args, **(kwargs or {}))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` as ``(W xᵀ)ᵀ`` for a batch of vectors."""
    if input.ndim != 2:
        return F.linear(input, weight, bias)
    out = (weight @ input.mT).mT
    return out if bias is None else out + bias


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Compute ``F.conv2d`` in the fast form for weights that differ between clients."""
    plain = groups == 1 and _pair(dilation) == (1, 1) and not isinstance(padding, str)
    if plain and input.ndim == 4 and input.is_cuda and _pair(stride) == (1, 1):
        return _on_gpu(input, weight, bias, *_pair(padding))
    if not plain or input.ndim != 4 or input.is_cuda or torch.backends.mkldnn.enabled:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    (down, across), (high, wide) = _pair(stride), _pair(padding)
    outputs, _, tall, broad = weight.shape
    patches = F.pad(input, (wide, wide, high, high)).unfold(2, tall, down).unfold(3, broad, across)
    examples, _, rows, columns = patches.shape[:4]
    flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(examples * rows * columns, -1)
    out = linear(flat, weight.reshape(outputs, -1), bias)
    return out.reshape(examples, rows, columns, outputs).permute(0, 3, 1, 2)


def _on_gpu(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        kind = torch.get_autocast_dtype("cuda")
        input, weight = input.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    if not convolution.available(input, weight):
        return F.conv2d(input, weight, bias, 1, (rows, columns))
    out: Tensor = convolution.conv2d(input, weight, rows, columns, precision())
    return out if bias is None else out + bias[:, None, None]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (*value, *value)[:2]


_SWAPS: dict[Any, Callable[..., Any]] = {F.linear: linear, F.conv2d: conv2d}


def gru_available(from_input: Tensor, weights: Tensor) -> bool:
    """Tell whether our kernels can compute this recurrence."""
    return (
        from_input.is_cuda
        and from_input.dtype in (torch.float32, torch.bfloat16)
        and weights.dtype == torch.float32
        and from_input.shape[-3] <= MAX_BATCH
        and HAS_TRITON
    )


def gru_states(from_input: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Compute all hidden states of one client's sequences, or of mapped clients."""
    if torch.is_autocast_enabled("cuda"):
        weights = weights.to(torch.get_autocast_dtype("cuda"))
    alone, _ = clients_gru(from_input.float()[None], weights[None], bias[None], precision())
    return alone[0, 1:].transpose(0, 1)  # type: ignore[no-any-return]


@custom_op("fedzmg::clients_gru", mutates_args=())
def clients_gru(
    from_input: Tensor, weights: Tensor, bias: Tensor, rounding: str
) -> tuple[Tensor, Tensor]:
    """Compute states ``[clients, steps + 1, batch, units]`` and the gates that backward needs."""
    from fedzmg.models.kernels import triton_recurrence

    return triton_recurrence.forward(
        from_input.contiguous(), weights.contiguous(), bias.contiguous(), rounding
    )


@clients_gru.register_fake
def _(from_input: Tensor, weights: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    clients, batch, steps, _ = from_input.shape
    units = weights.shape[-1]
    return (
        from_input.new_empty(clients, steps + 1, batch, units),
        from_input.new_empty(clients, steps, batch, 4, units),
    )


@clients_gru.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    every = [
        t.expand(info.batch_size, *t.shape) if d is None else clients_first(t, d)
        for t, d in zip(inputs[:3], in_dims, strict=False)
    ]
    found = clients_gru(*(t.flatten(0, 1) for t in every), inputs[3])
    states, gates = (t.unflatten(0, (info.batch_size, -1)) for t in found)
    return (states, gates), (0, 0)


@custom_op("fedzmg::clients_gru_back", mutates_args=())
def clients_gru_back(
    signal: Tensor, states: Tensor, gates: Tensor, weights: Tensor, rounding: str
) -> tuple[Tensor, Tensor]:
    """Compute gradients of ``from_input`` and of the products with the weights."""
    from fedzmg.models.kernels import triton_recurrence

    return triton_recurrence.backward(
        signal.contiguous(), states, gates, weights.contiguous(), rounding
    )


@clients_gru_back.register_fake
def _(signal: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    clients, batch, steps, units = signal.shape
    return (
        signal.new_empty(clients, batch, steps, 3 * units),
        signal.new_empty(clients, steps, batch, 3 * units),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weights, _, ctx.rounding = inputs
    ctx.save_for_backward(weights, *output)


def _backward(ctx: Any, of_states: Tensor, _of_gates: Tensor) -> tuple[Tensor | None, ...]:
    weights, states, gates = ctx.saved_tensors
    signal = of_states[:, 1:].transpose(1, 2)
    to_input, to_hidden = clients_gru_back(signal, states, gates, weights, ctx.rounding)
    flat = to_hidden.flatten(1, 2)
    before = states[:, :-1].flatten(1, 2)
    kind = weights.dtype
    for_weights = torch.bmm(flat.mT.to(kind), before.to(kind))
    return to_input, for_weights, flat.sum(1), None


clients_gru.register_autograd(_backward, setup_context=_setup_context)
