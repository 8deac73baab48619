"""Dropout whose mask is a function of an address, not of a global generator.

The mask of an element depends on the step's key, the layer and the element's place in its example
and batch. It is computed with integer arithmetic on the device, so a client trained alone, mapped
with others or padded to a longer batch drops the same units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Each constant is below 2^31, so that a product with a 32-bit value stays inside a signed 64-bit
# lane: no overflow, hence the same bits eager, compiled, on CPU and on GPU.
_MULTIPLIERS = (0x7FEB352D, 0x45D9F3B3 & 0x7FFFFFFF, 0x31848BAB)
_MASK32 = 0xFFFFFFFF


def hash32(value: Tensor) -> Tensor:
    """Scramble 32-bit integers held in int64 lanes: three rounds of xor-shift and multiply."""
    for multiplier in _MULTIPLIERS:
        value = value ^ (value >> 16)
        value = (value * multiplier) & _MASK32
    return value ^ (value >> 15)


def keep_mask(key: Tensor, layer: int, shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """True where an element is kept, for a batch of shape ``shape`` (examples first)."""
    place = torch.arange(shape.numel(), device=device).reshape(shape)
    low, high = key & _MASK32, (key >> 32) & _MASK32
    bits = hash32(hash32(hash32(place ^ low) ^ high) ^ hash32(torch.full_like(place, layer + 1)))
    return bits >= int(p * (_MASK32 + 1))


class KeyedDropout(nn.Module):
    """Stands in for ``nn.Dropout``; ``key`` is filled in by the functional model at every call."""

    key: Tensor

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Zero each element with probability ``p`` and rescale the rest; identity in eval mode."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        keep = keep_mask(self.key, self.layer, x.shape, self.p, x.device)
        return torch.where(keep, x / (1 - self.p), torch.zeros_like(x))

    def extra_repr(self) -> str:
        """Probability and layer, as printed inside a model."""
        return f"p={self.p}, layer={self.layer}"
