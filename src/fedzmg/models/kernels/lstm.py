"""A layer of an LSTM whose weights differ between clients, as one operator for a GPU.

Step by step through torch's own operations, a layer is some forty launches per time step, forward
and back. Our kernels need two; the loops here are their reference.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.models.kernels.precision import HAS_TRITON, clients_first, precision


def available(from_input: Tensor) -> bool:
    """Tell whether our kernels can compute this recurrence."""
    known = from_input.dtype in (torch.float32, torch.bfloat16)
    return from_input.is_cuda and known and HAS_TRITON


def states(from_input: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute hidden states ``(batch, time, units)`` from zero, and the last cell."""
    if torch.is_autocast_enabled("cuda"):
        weights = weights.to(torch.get_autocast_dtype("cuda"))
    given = from_input.to(bias.dtype)[None]
    found = clients_lstm(given, weights[None], bias[None], precision())
    return found[0][0].transpose(0, 1), found[1][0]


@custom_op("fedzmg::clients_lstm", mutates_args=())
def clients_lstm(
    from_input: Tensor, weights: Tensor, bias: Tensor, rounding: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute states ``[clients, time, batch, units]``, the last cell, all cells and gates."""
    from_input, weights, bias = (t.contiguous() for t in (from_input, weights, bias))
    if from_input.is_cuda and from_input.dtype == torch.float32 and HAS_TRITON:
        from fedzmg.models.kernels import triton_lstm

        states, cells, gates = triton_lstm.forward(from_input, weights, bias, rounding)
    else:
        states, cells, gates = reference(from_input, weights, bias)
    return states, cells[:, -1].clone(), cells, gates


def reference(from_input: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states, cells and the gates (write, keep, new, show) after their functions."""
    clients, batch, steps, width = from_input.shape
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    state = cell = from_input.new_zeros(clients, batch, width // 4)
    for t in range(steps):
        own = torch.bmm(state.to(weights.dtype), weights.mT)
        gates = (from_input[:, :, t] + bias[:, None] + own).chunk(4, -1)
        write, keep, show = (torch.sigmoid(gates[i]) for i in (0, 1, 3))
        cell = keep * cell + write * torch.tanh(gates[2])
        state = show * torch.tanh(cell)
        found.append((state, cell, torch.cat([write, keep, torch.tanh(gates[2]), show], -1)))
    states, cells, kept = (torch.stack(each, 1) for each in zip(*found, strict=True))
    return states, cells, kept


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
    signal, of_cell, weights = (t.contiguous() for t in (signal, of_cell, weights))
    if signal.is_cuda and signal.dtype == torch.float32 and HAS_TRITON:
        from fedzmg.models.kernels import triton_lstm

        return triton_lstm.backward(signal, of_cell, cells, gates, weights, rounding)
    return reference_back(signal, of_cell, cells, gates, weights)


def reference_back(
    signal: Tensor, of_cell: Tensor, cells: Tensor, gates: Tensor, weights: Tensor
) -> Tensor:
    """Compute the same as :func:`clients_lstm_back`."""
    down, found = signal[:, -1], []
    for t in reversed(range(signal.shape[1])):
        write, keep, new, show = gates[:, t].chunk(4, -1)
        bent = torch.tanh(cells[:, t])
        of_cell = of_cell + down * show * (1 - bent * bent)
        old = cells[:, t - 1] if t else torch.zeros_like(bent)
        parts = [
            of_cell * new * write * (1 - write),
            of_cell * old * keep * (1 - keep),
            of_cell * write * (1 - new * new),
            down * bent * show * (1 - show),
        ]
        found.append(torch.cat(parts, -1))
        of_cell = of_cell * keep
        down = signal[:, t - 1] + torch.bmm(found[-1].to(weights.dtype), weights)
    return torch.stack(found[::-1], 1)


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
