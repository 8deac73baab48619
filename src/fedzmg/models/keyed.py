"""Layers whose randomness is a function of an address, not of a global generator.

A random number depends on the step's key, the layer, the call and its place in the batch. It is
computed with integer arithmetic on the device, so a client trained alone, mapped with others or
padded to a longer batch draws the same numbers.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor, nn

from fedzmg.models.kernels.draws import RANGE, draws


class KeyedLayer(nn.Module):
    """A layer that draws random numbers in training.

    The functional model numbers the layers, fills in ``key`` at every step and sets ``calls`` to
    zero before every pass, so that a layer called twice in one pass draws twice.
    """

    key: Tensor

    def __init__(self, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.calls = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def numbered(self, layer: int) -> Self:
        """Copy the layer for another place in a model."""
        other = copy.deepcopy(self)
        other.layer = layer
        return other

    def draw(self, shape: torch.Size, device: torch.device, below: int | None = None) -> Tensor:
        """Draw 32 random bits for every place of ``shape`` (examples first).

        With ``below``, return whether they are under that number instead.
        """
        call = self.calls
        self.calls = call + 1
        found: Tensor = draws(self.key.to(device), self.layer, call, shape.numel(), below)
        return found.reshape(shape)


class KeyedDropout(KeyedLayer):
    """Replacement of ``nn.Dropout``."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__(layer)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero each element with probability ``p`` and rescale the rest; identity in eval mode."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        zeroed = self.draw(x.shape, x.device, below=int(self.p * RANGE))
        return torch.where(zeroed, torch.zeros_like(x), x / (1 - self.p))

    def extra_repr(self) -> str:
        """Probability and layer, as printed inside a model."""
        return f"p={self.p}, layer={self.layer}"
