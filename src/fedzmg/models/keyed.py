"""Layers whose randomness is a function of an address, not of a global generator.

A random number depends on the step's key, the layer, the call and its place in the batch. It is
computed with integer arithmetic on the device, so a client trained alone, mapped with others or
padded to a longer batch draws the same numbers. Image augmentation goes in front of a model:

>>> model = nn.Sequential(RandomShift(4), RandomFlip(), nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

It acts in training only, and moves every example by numbers of its own.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor, nn

from fedzmg.errors import InputError
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
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        zeroed = self.draw(x.shape, x.device, below=int(self.p * RANGE))
        return torch.where(zeroed, torch.zeros_like(x), x / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


class RandomFlip(KeyedLayer):
    """Mirrors left and right with probability one half; input ``(n, ..., height, width)``."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        flipped = self.draw(x.shape[:1], x.device) >= RANGE // 2
        return torch.where(_per_example(flipped, x), x.flip(-1), x)

    def extra_repr(self) -> str:
        return f"layer={self.layer}"


class RandomShift(KeyedLayer):
    """Moves images by up to ``pixels`` down or up and across; input ``(n, ..., height, width)``.

    The same as padding by ``pixels`` and cropping at random.

    Args:
        pixels: the largest move; every whole number from ``-pixels`` to ``pixels`` is as likely.
        edge: fill what comes into view with the nearest pixel instead of zero.
    """

    def __init__(self, pixels: int, *, edge: bool = False) -> None:
        super().__init__()
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 0:
            raise InputError(f"pixels = {pixels!r}: expected a whole number of at least 0")
        self.pixels, self.edge = pixels, edge

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.pixels == 0:
            return x
        bits = self.draw(torch.Size((len(x), 2)), x.device)
        moves = bits % (2 * self.pixels + 1) - self.pixels
        for move, axis in zip(moves.unbind(1), (-2, -1), strict=True):
            x = self._along(x, move, axis)
        return x

    def _along(self, x: Tensor, move: Tensor, axis: int) -> Tensor:
        size = x.shape[axis]
        line = torch.arange(size, device=x.device)
        source = _per_example(move, x) + (line if axis == -1 else line[:, None])
        moved = x.gather(axis, source.clamp(0, size - 1).expand(x.shape))
        if self.edge:
            return moved
        return torch.where((source >= 0) & (source < size), moved, torch.zeros_like(x))

    def extra_repr(self) -> str:
        return f"pixels={self.pixels}, edge={self.edge}, layer={self.layer}"


def _per_example(values: Tensor, x: Tensor) -> Tensor:
    """Shape one value per example to go with the batch."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
