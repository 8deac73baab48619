"""A layer of an LSTM whose weights differ between clients, as one operator for a GPU.

Step by step through torch's own operations, a layer is some forty launches per time step, forward
and back. Our kernels need two.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.kernels.precision import clients_first, precision


def states(from_input: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute hidden states ``(batch, time, units)`` from zero, and the last cell."""
    given = from_input.to(bias.dtype)[None]
    found = clients_lstm(given, weights[None], bias[None], precision())
    return found[0][0].transpose(0, 1), found[1][0]


@custom_op("fedzmg::clients_lstm", mutates_args=())
def clients_lstm(
    from_input: Tensor, weights: Tensor, bias: Tensor, rounding: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute states ``[clients, time, batch, units]``, the last cell, all cells and gates."""
    from fedzmg.kernels import triton_lstm

    from_input, weights, bias = (t.contiguous() for t in (from_input, weights, bias))
    states, cells, gates = triton_lstm.forward(from_input, weights, bias, rounding)
    return states, cells[:, -1].clone(), cells, gates


@clients_lstm.register_fake
def _(from_input: Tensor, *_rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clients, batch, steps, width = from_input.shape
    units = width // 4
    shapes = (steps, batch, units), (batch, units), (steps, batch, units), (steps, batch, width)
    one, two, three, four = (from_input.new_empty(clients, *shape) for shape in shapes)
    return one, two, three, four


@clients_lstm.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size, pairs = info.batch_size, zip(inputs[:3], in_dims, strict=False)
    every = [t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs]
    found = clients_lstm(*(t.flatten(0, 1) for t in every), inputs[3])
    return tuple(t.unflatten(0, (size, -1)) for t in found), (0, 0, 0, 0)


@custom_op("fedzmg::clients_lstm_back", mutates_args=())
def clients_lstm_back(
    signal: Tensor, of_cell: Tensor, cells: Tensor, gates: Tensor, weights: Tensor, rounding: str
) -> Tensor:
    """Compute the gradients of the gates' sums ``[clients, time, batch, 4 units]``."""
    from fedzmg.kernels import triton_lstm

    signal, of_cell, weights = (t.contiguous() for t in (signal, of_cell, weights))
    return triton_lstm.backward(signal, of_cell, cells, gates, weights, rounding)


@clients_lstm_back.register_fake
def _(_signal: Tensor, _of_cell: Tensor, _cells: Tensor, gates: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gates)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rounding = inputs[3]
    ctx.save_for_backward(inputs[1], output[0], *output[2:])


def _backward(
    ctx: Any, of_states: Tensor, of_cell: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    weights, states, cells, gates = ctx.saved_tensors
    sums = clients_lstm_back(of_states, of_cell, cells, gates, weights, ctx.rounding)
    kind, before = weights.dtype, states[:, :-1].flatten(1, 2)
    for_weights = torch.bmm(sums[:, 1:].flatten(1, 2).mT.to(kind), before.to(kind))
    return sums.transpose(1, 2), for_weights, sums.flatten(1, 2).sum(1), None


clients_lstm.register_autograd(_backward, setup_context=_setup_context)
