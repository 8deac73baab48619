"""Recurrent layers that can be mapped over clients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """Sizes, as printed inside a model."""
        return f"{self.input_size}, {self.hidden_size}"

    def forward(self, x: Tensor) -> Tensor:
        """All hidden states of a sequence."""
        from_input = F.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        hidden = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for now in from_input.unbind(1):
            reset_in, update_in, new_in = now.chunk(3, -1)
            from_hidden = F.linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
            reset_h, update_h, new_h = from_hidden.chunk(3, -1)
            reset = torch.sigmoid(reset_in + reset_h)
            update = torch.sigmoid(update_in + update_h)
            new = torch.tanh(new_in + reset * new_h)
            hidden = new + update * (hidden - new)
            states.append(hidden)
        return torch.stack(states, 1)
