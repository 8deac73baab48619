"""A layer of an LSTM whose weights differ between clients, as one operator for a GPU.

Step by step through torch's own operations, a layer is some forty launches per time step, forward
and back. Here a time step is a product of matrices and one fused operation of torch; the gradient
of the weights is one large product after the last time step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.models.kernels.precision import clients_first

Cell = tuple[Tensor, Tensor, Tensor]


def available(from_input: Tensor) -> bool:
    """Tell whether the operator can compute this recurrence."""
    return from_input.is_cuda and from_input.dtype in (torch.float32, torch.bfloat16)


def states(from_input: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute hidden states ``(batch, time, units)`` from zero, and the last cell."""
    if torch.is_autocast_enabled("cuda"):
        weights = weights.to(torch.get_autocast_dtype("cuda"))
    found = clients_lstm(from_input.to(bias.dtype)[None], weights[None], bias[None])
    return found[0][0].transpose(0, 1), found[1][0]


def _next(given: Tensor, own: Tensor, cell: Tensor) -> Cell:
    """Compute state, cell and the gates after their functions, from both products of a step."""
    if given.is_cuda:
        return torch.ops.aten._thnn_fused_lstm_cell(given, own, cell)  # type: ignore[no-any-return]
    write, keep, new, show = (given + own).chunk(4, -1)
    gates = [torch.sigmoid(write), torch.sigmoid(keep), torch.tanh(new), torch.sigmoid(show)]
    cell = gates[1] * cell + gates[0] * gates[2]
    return gates[3] * torch.tanh(cell), cell, torch.cat(gates, -1)


def _back(of_state: Tensor, of_cell: Tensor, old: Tensor, cell: Tensor, gates: Tensor) -> Cell:
    """Compute the gradients of the sum of both products, and of the cell before."""
    if gates.is_cuda:
        back = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        return back(of_state, of_cell, old, cell, gates, False)  # type: ignore[no-any-return]
    write, keep, new, show = gates.chunk(4, -1)
    bent = torch.tanh(cell)
    of_cell = of_cell + of_state * show * (1 - bent * bent)
    parts = [
        of_cell * new * write * (1 - write),
        of_cell * old * keep * (1 - keep),
        of_cell * write * (1 - new * new),
        of_state * bent * show * (1 - show),
    ]
    return torch.cat(parts, -1), of_cell * keep, of_cell


@custom_op("fedzmg::clients_lstm", mutates_args=())
def clients_lstm(
    from_input: Tensor, weights: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute states ``[clients, time, batch, units]``, the last cell, all cells and gates."""
    clients, batch, steps, width = from_input.shape
    turned, kind = weights.mT, weights.dtype
    given = (from_input + bias[:, None, None]).permute(2, 0, 1, 3).reshape(steps, -1, width)
    cell = given.new_zeros(clients * batch, width // 4)
    state, found, kept = cell, [], []
    cells = [cell]
    for now in given:
        own = torch.bmm(state.reshape(clients, batch, -1).to(kind), turned)
        state, cell, gates = _next(now, own.reshape(now.shape).to(now.dtype), cell)
        found.append(state)
        cells.append(cell)
        kept.append(gates)
    states, cells_, gates_ = (_by_client(part, clients) for part in (found, cells, kept))
    return states, cell.reshape(clients, batch, -1).clone(), cells_, gates_


def _by_client(steps: list[Tensor], clients: int) -> Tensor:
    """Stack what each time step has for the batches of all clients, clients first."""
    each = torch.stack(steps)
    found = each.reshape(len(steps), clients, -1, each.shape[-1]).transpose(0, 1)
    return found.contiguous()


@clients_lstm.register_fake
def _(from_input: Tensor, _weights: Tensor, _bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clients, batch, steps, width = from_input.shape
    units = width // 4
    shapes = (steps, batch, units), (batch, units), (steps + 1, batch, units), (steps, batch, width)
    one, two, three, four = (from_input.new_empty(clients, *shape) for shape in shapes)
    return one, two, three, four


@clients_lstm.register_vmap
def _(info: Any, in_dims: Any, *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    size, pairs = info.batch_size, zip(inputs, in_dims, strict=True)
    every = [t.expand(size, *t.shape) if d is None else clients_first(t, d) for t, d in pairs]
    found = clients_lstm(*(t.flatten(0, 1) for t in every))
    return tuple(t.unflatten(0, (size, -1)) for t in found), (0, 0, 0, 0)


@custom_op("fedzmg::clients_lstm_back", mutates_args=())
def clients_lstm_back(
    signal: Tensor, of_cell: Tensor, cells: Tensor, gates: Tensor, weights: Tensor
) -> Tensor:
    """Compute the gradients of the gates' sums ``[clients, time, batch, 4 units]``."""
    clients, steps, batch, units = signal.shape
    # Time first, clients and batch together.
    each = [part.transpose(0, 1).flatten(1, 2).contiguous() for part in (signal, cells, gates)]
    down, carried = each[0][-1], of_cell.reshape(-1, units)
    found = []
    for t in reversed(range(steps)):
        around = each[1][t], each[1][t + 1], each[2][t]
        out, carried, _ = _back(down, carried, *around)
        found.append(out)
        own = out.reshape(clients, batch, -1), weights
        before = each[0][max(t - 1, 0)].reshape(clients, batch, units)
        if weights.dtype == out.dtype:
            down = torch.baddbmm(before, *own).flatten(0, 1)
        else:
            down = (before + torch.bmm(own[0].to(weights.dtype), weights)).flatten(0, 1)
    return _by_client(found[::-1], clients)


@clients_lstm_back.register_fake
def _(_signal: Tensor, _of_cell: Tensor, _cells: Tensor, gates: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(gates)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1], output[0], *output[2:])


def _backward(
    ctx: Any, of_states: Tensor, of_cell: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weights, states, cells, gates = ctx.saved_tensors
    sums = clients_lstm_back(of_states, of_cell, cells, gates, weights)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    flat, kind = sums.flatten(1, 2), weights.dtype
    for_weights = torch.bmm(flat.mT.to(kind), before.flatten(1, 2).to(kind))
    return sums.transpose(1, 2), for_weights, flat.sum(1)


clients_lstm.register_autograd(_backward, setup_context=_setup_context)
