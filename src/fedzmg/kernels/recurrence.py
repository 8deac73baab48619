"""A layer of a GRU or LSTM whose weights differ between clients, as one operator for a GPU.

Step by step through torch's own operations, a layer is some forty launches per time step, forward
and back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.kernels.precision import clients_first, precision


def states(from_input: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Compute hidden states ``(batch, time, units)`` from zero, and the last cell of an LSTM."""
    given = from_input.to(bias.dtype)[None]
    found, last, *_ = clients_recurrence(given, weights[None], bias[None], precision())
    cell = (last[0],) if len(weights) == 4 * weights.shape[-1] else ()
    return found[0].transpose(0, 1), *cell


@custom_op("fedzmg::clients_recurrence", mutates_args=())
def clients_recurrence(
    from_input: Tensor, weights: Tensor, bias: Tensor, rounding: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute states ``[clients, time, batch, units]``, an LSTM's last and all cells, and gates."""
    from fedzmg.kernels import triton_recurrence

    from_input, weights, bias = (t.contiguous() for t in (from_input, weights, bias))
    states, cells, gates = triton_recurrence.forward(from_input, weights, bias, rounding)
    return states, cells[:, -1].clone(), cells, gates


@clients_recurrence.register_fake
def _(from_input: Tensor, weights: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clients, batch, steps, width = from_input.shape
    units = weights.shape[-1]
    cell = units if width == 4 * units else 0
    shapes = (steps, batch, units), (batch, cell), (steps, batch, cell), (steps, batch, 4 * units)
    one, two, three, four = (from_input.new_empty(clients, *shape) for shape in shapes)
    return one, two, three, four


@clients_recurrence.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size, pairs = info.batch_size, zip(inputs[:3], in_dims, strict=False)
    every = [t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs]
    found = clients_recurrence(*(t.flatten(0, 1) for t in every), inputs[3])
    return tuple(t.unflatten(0, (size, -1)) for t in found), (0, 0, 0, 0)


@custom_op("fedzmg::clients_recurrence_back", mutates_args=())
def clients_recurrence_back(
    signal: Tensor, of_cell: Tensor, states: Tensor, cells: Tensor, gates: Tensor, weights: Tensor,
    rounding: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of a GRU's input, and of the products with the weights."""
    from fedzmg.kernels import triton_recurrence

    signal, of_cell, weights = (t.contiguous() for t in (signal, of_cell, weights))
    return triton_recurrence.backward(signal, of_cell, states, cells, gates, weights, rounding)


@clients_recurrence_back.register_fake
def _(
    signal: Tensor, _of_cell: Tensor, _states: Tensor, cells: Tensor, _gates: Tensor,
    weights: Tensor, _rounding: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = weights.shape[1]
    own = 0 if cells.shape[-1] else width
    return tuple(signal.new_empty(*signal.shape[:3], size) for size in (own, width))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rounding = inputs[3]
    ctx.save_for_backward(inputs[1], output[0], *output[2:])


def _backward(
    ctx: Any, of_states: Tensor, of_cell: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    weights, states, *kept = ctx.saved_tensors
    given = of_states, of_cell, states, *kept, weights, ctx.rounding
    to_input, sums = clients_recurrence_back(*given)
    kind, before = weights.dtype, states[:, :-1].flatten(1, 2)
    for_weights = torch.bmm(sums[:, 1:].flatten(1, 2).mT.to(kind), before.to(kind))
    first = to_input if to_input.shape[-1] else sums
    return first.transpose(1, 2), for_weights, sums.flatten(1, 2).sum(1), None


clients_recurrence.register_autograd(_backward, setup_context=_setup_context)
