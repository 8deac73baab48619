"""The GPU kernels of an LSTM as loops over time steps, on any device and in any precision."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    from_input: Tensor, weights: Tensor, bias: Tensor, _precision: str = "ieee"
) -> tuple[Tensor, Tensor, Tensor]:
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


def backward(
    signal: Tensor, of_cell: Tensor, cells: Tensor, gates: Tensor, weights: Tensor,
    _precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """Compute the gradients of the gates' sums."""
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
