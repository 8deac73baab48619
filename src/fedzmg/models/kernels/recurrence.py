"""The recurrence of a GRU as an operator with a rule for mapping it over clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.models.kernels.precision import HAS_TRITON, clients_first, precision

MAX_BATCH = 64
"""Larger batches do not fit in one tile of our kernels."""


def available(from_input: Tensor, weights: Tensor) -> bool:
    """Tell whether our kernels can compute this recurrence."""
    return (
        from_input.is_cuda
        and from_input.dtype in (torch.float32, torch.bfloat16)
        and weights.dtype == torch.float32
        and from_input.shape[-3] <= MAX_BATCH
        and HAS_TRITON
    )


def states(from_input: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
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
