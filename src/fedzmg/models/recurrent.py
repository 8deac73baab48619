"""Recurrent layers of matrix products, which map over clients as torch's fused ones do not.

:class:`GRU` is for models to use. The cells stand in for torch's own inside functional models:
same parameters, same results.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedzmg.models.kernels import recurrence


class GRU(nn.Module):
    """A gated recurrent layer of matrix products, with ``nn.GRU``'s parameter names and results.

    cuDNN's fused GRU cannot be mapped over clients; this one can. Input ``(batch, time, inputs)``,
    output ``(batch, time, units)``; the first hidden state is zero.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = inputs, units
        for name, shape in {
            "weight_ih_l0": (3 * units, inputs),
            "weight_hh_l0": (3 * units, units),
            "bias_ih_l0": (3 * units,),
            "bias_hh_l0": (3 * units,),
        }.items():
            bound = units**-0.5
            setattr(self, name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"

    def forward(self, x: Tensor) -> Tensor:
        from_input = F.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        if recurrence.available(from_input, self.weight_hh_l0):
            return recurrence.states(from_input, self.weight_hh_l0, self.bias_hh_l0)
        hidden = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for now in from_input.unbind(1):
            hidden = _gru(now, F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0), hidden)
            states.append(hidden)
        return torch.stack(states, 1)


def _gru(from_input: Tensor, from_hidden: Tensor, hidden: Tensor) -> Tensor:
    """Compute the next state; both products hold the gates reset, update, new."""
    reset_in, update_in, new_in = from_input.chunk(3, -1)
    reset_h, update_h, new_h = from_hidden.chunk(3, -1)
    reset = torch.sigmoid(reset_in + reset_h)
    update = torch.sigmoid(update_in + update_h)
    new = torch.tanh(new_in + reset * new_h)
    return new + update * (hidden - new)


class GRUCell(nn.GRUCell):
    """``nn.GRUCell`` of matrix products."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        hidden = _zeros(self, input) if hx is None else hx
        return _gru(
            F.linear(input, self.weight_ih, self.bias_ih),
            F.linear(hidden, self.weight_hh, self.bias_hh),
            hidden,
        )


class LSTMCell(nn.LSTMCell):
    """``nn.LSTMCell`` of matrix products."""

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, cell = (_zeros(self, input), _zeros(self, input)) if hx is None else hx
        gates = F.linear(input, self.weight_ih, self.bias_ih) + F.linear(
            hidden, self.weight_hh, self.bias_hh
        )
        write, keep, new, show = gates.chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
        return torch.sigmoid(show) * torch.tanh(cell), cell


class RNNCell(nn.RNNCell):
    """``nn.RNNCell`` of matrix products."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        hidden = _zeros(self, input) if hx is None else hx
        total = F.linear(input, self.weight_ih, self.bias_ih) + F.linear(
            hidden, self.weight_hh, self.bias_hh
        )
        return torch.relu(total) if self.nonlinearity == "relu" else torch.tanh(total)


def _zeros(cell: nn.RNNCellBase, input: Tensor) -> Tensor:
    return input.new_zeros(*input.shape[:-1], cell.hidden_size)
