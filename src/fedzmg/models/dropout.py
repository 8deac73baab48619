"""Dropout whose mask is a function of an address."""

from __future__ import annotations

import torch
from torch import Tensor

from fedzmg.models.kernels.draws import RANGE
from fedzmg.models.keyed import KeyedLayer


class KeyedDropout(KeyedLayer):
    """Stands in for ``nn.Dropout``."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__(layer)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero each element with probability ``p`` and rescale the rest; identity in eval mode."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        zeroed = self.draw_under(int(self.p * RANGE), x.shape, x.device)
        return torch.where(zeroed, torch.zeros_like(x), x / (1 - self.p))

    def extra_repr(self) -> str:
        """Probability and layer, as printed inside a model."""
        return f"p={self.p}, layer={self.layer}"
