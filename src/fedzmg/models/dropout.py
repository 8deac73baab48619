"""Dropout whose mask is a function of an address."""

from __future__ import annotations

import torch
from torch import Tensor

from fedzmg.models.keyed import RANGE, KeyedLayer


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
        keep = self.draw(x.shape, x.device) >= int(self.p * RANGE)
        return torch.where(keep, x / (1 - self.p), torch.zeros_like(x))

    def extra_repr(self) -> str:
        """Probability and layer, as printed inside a model."""
        return f"p={self.p}, layer={self.layer}"
