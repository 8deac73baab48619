"""From stored bytes to what an image model reads, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Polarity: TypeAlias = Literal["background-one", "ink-one"]
Centring: TypeAlias = Literal["none", "image"]


@dataclass(frozen=True)
class Pixels:
    """Stored pixels to the unit interval, then perhaps turned over or centred.

    Args:
        polarity: ``background-one`` leaves them as the files have them, where the background of
            a character is the largest value; ``ink-one`` turns them over.
        centring: ``image`` subtracts each image's own mean, over all its pixels and channels.
        axes: how many of the last axes make one image; those before are batches and clients.
    """

    polarity: Polarity = "background-one"
    centring: Centring = "none"
    axes: int = 2

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Convert a batch of stored images."""
        # Files whose pixels are no multiples of 1/255 are kept as the fractions that they hold.
        pixels = x.to(dtype) if x.is_floating_point() else x.to(dtype) / 255
        if self.polarity == "ink-one":
            pixels = 1 - pixels
        if self.centring == "image":
            pixels = pixels - pixels.mean(tuple(range(-self.axes, 0)), keepdim=True)
        return pixels
