"""Layers whose randomness is a function of an address, not of a global generator.

A random number depends on the step's key, the layer, the call and its place in the batch. It is
computed with integer arithmetic on the device, so a client trained alone, mapped with others or
padded to a longer batch draws the same numbers.
"""

from __future__ import annotations

import copy
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

# Each constant is below 2^31, so that a product with a 32-bit value stays inside a signed 64-bit
# lane: no overflow, hence the same bits eager, compiled, on CPU and on GPU.
_MULTIPLIERS = (0x7FEB352D, 0x45D9F3B3 & 0x7FFFFFFF, 0x31848BAB)
_MASK32 = 0xFFFFFFFF
RANGE = _MASK32 + 1
"""Random bits are whole numbers from 0 up to, not including, this one."""

Whole = TypeVar("Whole", int, Tensor)


def hash32(value: Whole) -> Whole:
    """Scramble 32-bit integers (in int64 lanes): three rounds of xor-shift and multiply."""
    for multiplier in _MULTIPLIERS:
        value = value ^ (value >> 16)
        value = (value * multiplier) & _MASK32
    return value ^ (value >> 15)


def random_bits(
    key: Tensor, layer: int, shape: torch.Size, device: torch.device, call: int = 0
) -> Tensor:
    """32 random bits for every place of a batch of shape ``shape`` (examples first)."""
    place = torch.arange(shape.numel(), device=device).reshape(shape)
    low, high = key & _MASK32, (key >> 32) & _MASK32
    bits = hash32(hash32(hash32(place ^ low) ^ high) ^ hash32(layer + 1))
    # The first call keeps the bits it has always had.
    return bits if call == 0 else hash32(bits ^ hash32(call))


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
        call = self.calls
        self.calls = call + 1
        return random_bits(self.key, self.layer, shape, device, call)
