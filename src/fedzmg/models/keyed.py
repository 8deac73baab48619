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

from fedzmg.models.kernels.draws import draws


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
        """A copy for another place in a model."""
        other = copy.deepcopy(self)
        other.layer = layer
        return other

    def draw(self, shape: torch.Size, device: torch.device) -> Tensor:
        """32 random bits for every place of ``shape`` (examples first)."""
        return self._draws(shape, device, None)

    def draw_under(self, below: int, shape: torch.Size, device: torch.device) -> Tensor:
        """Whether the random bits of each place are under a number."""
        return self._draws(shape, device, below)

    def _draws(self, shape: torch.Size, device: torch.device, below: int | None) -> Tensor:
        call = self.calls
        self.calls = call + 1
        found: Tensor = draws(self.key.to(device), self.layer, call, shape.numel(), below)
        return found.reshape(shape)
