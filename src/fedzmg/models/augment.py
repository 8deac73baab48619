"""Image augmentation for local training, by address: put these layers in front of a model.

>>> from torch import nn
>>> model = nn.Sequential(RandomShift(4), RandomFlip(), nn.Flatten(), nn.Linear(3 * 32 * 32, 10))

They act in training only; in evaluation an image passes unchanged. Every example is moved by
numbers of its own, so a client sees the same images alone, mapped with others or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedzmg.errors import InputError
from fedzmg.models.kernels.draws import RANGE
from fedzmg.models.keyed import KeyedLayer


class RandomFlip(KeyedLayer):
    """Mirrors left and right with probability one half; input ``(n, ..., height, width)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Flip some of the images; identity in eval mode."""
        if not self.training:
            return x
        flipped = self.draw(x.shape[:1], x.device) >= RANGE // 2
        return torch.where(_per_example(flipped, x), x.flip(-1), x)

    def extra_repr(self) -> str:
        """Layer, as printed inside a model."""
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
        """Shift every image by a distance of its own; identity in eval mode."""
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
        """Settings and layer, as printed inside a model."""
        return f"pixels={self.pixels}, edge={self.edge}, layer={self.layer}"


def _per_example(values: Tensor, x: Tensor) -> Tensor:
    """One value per example, shaped to go with the batch."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
