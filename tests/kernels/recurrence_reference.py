"""The GPU kernels of recurrent layers as loops over time steps, on any device, in any precision."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    from_input: Tensor, weights: Tensor, bias: Tensor, _precision: str = "ieee"
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states, cells and gates, of a GRU or an LSTM."""
    clients, batch, steps, _ = from_input.shape
    units = weights.shape[-1]
    is_lstm = len(weights[0]) == 4 * units
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    state = from_input.new_zeros(clients, batch, units)
    cell = state if is_lstm else state[..., :0]
    for t in range(steps):
        given, own = from_input[:, :, t], torch.bmm(state.to(weights.dtype), weights.mT)
        if is_lstm:
            gates = (given + bias[:, None] + own).chunk(4, -1)
            write, keep, show = (torch.sigmoid(gates[i]) for i in (0, 1, 3))
            cell = keep * cell + write * torch.tanh(gates[2])
            state = show * torch.tanh(cell)
            kept = [write, keep, torch.tanh(gates[2]), show]
        else:
            inputs, products = given.chunk(3, -1), (own + bias[:, None]).chunk(3, -1)
            reset, update = (torch.sigmoid(inputs[i] + products[i]) for i in (0, 1))
            new = torch.tanh(inputs[2] + reset * products[2])
            state = new + update * (state - new)
            kept = [reset, update, new, products[2]]
        found.append((state, cell, torch.cat(kept, -1)))
    states, cells, kept_gates = (torch.stack(each, 1) for each in zip(*found, strict=True))
    return states, cells, kept_gates


def backward(
    signal: Tensor, of_cell: Tensor, states: Tensor, cells: Tensor, gates: Tensor, weights: Tensor,
    _precision: str = "ieee",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of a GRU's input, and of the products with the weights."""
    is_lstm = len(weights[0]) == 4 * weights.shape[-1]
    past = cells if is_lstm else states
    down, found, inputs = signal[:, -1], [], []
    for t in reversed(range(signal.shape[1])):
        one, two, new, last = gates[:, t].chunk(4, -1)
        old = past[:, t - 1] if t else torch.zeros_like(new)
        if is_lstm:
            bent = torch.tanh(cells[:, t])
            of_cell = of_cell + down * last * (1 - bent * bent)
            parts = [
                of_cell * new * one * (1 - one),
                of_cell * old * two * (1 - two),
                of_cell * one * (1 - new * new),
                down * bent * last * (1 - last),
            ]
            of_cell, carried = of_cell * two, 0
            inputs.append(new[..., :0])
        else:
            direct = down * (1 - two) * (1 - new * new)
            parts = [direct * last * one * (1 - one), down * (old - new) * two * (1 - two)]
            inputs.append(torch.cat([*parts, direct], -1))
            parts, carried = [*parts, direct * one], down * two
        found.append(torch.cat(parts, -1))
        down = signal[:, t - 1] + carried + torch.bmm(found[-1].to(weights.dtype), weights)
    return torch.stack(inputs[::-1], 1), torch.stack(found[::-1], 1)
