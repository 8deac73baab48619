"""Random bits as a function of an address, and the operator that draws them.

:func:`random_bits` defines them. It takes some forty passes over 64-bit numbers and does not
compile well: the compiler repeats a value wherever it is used, and each of the twelve
``x ^ (x >> n)`` uses its value twice. So layers draw with :func:`draws`, one operator to torch and
to the compiler, which makes the same bits on chip or in cache.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.library import custom_op

from fedzmg.models.kernels.precision import HAS_TRITON, clients_first

# Each constant is below 2^31, so that a product with a 32-bit value stays inside a signed 64-bit
# lane: no overflow, hence the same bits eager, compiled, on CPU and on GPU.
MULTIPLIERS = (0x7FEB352D, 0x45D9F3B3 & 0x7FFFFFFF, 0x31848BAB)
_MASK32 = 0xFFFFFFFF
RANGE = _MASK32 + 1
"""Random bits are whole numbers from 0 up to, not including, this one."""
BLOCK = 1 << 15
"""Places that a CPU works on at a time: they stay in its cache."""

Whole = TypeVar("Whole", int, Tensor)
Words = npt.NDArray[np.uint32]


def hash32(value: Whole) -> Whole:
    """Scramble 32-bit integers (in int64 lanes): three rounds of xor-shift and multiply."""
    for multiplier in MULTIPLIERS:
        value = value ^ (value >> 16)
        value = (value * multiplier) & _MASK32
    return value ^ (value >> 15)


def random_bits(
    key: Tensor, layer: int, shape: torch.Size, device: torch.device, call: int = 0
) -> Tensor:
    """Compute 32 random bits for every place of a batch of shape ``shape`` (examples first)."""
    place = torch.arange(shape.numel(), device=device).reshape(shape)
    low, high = key & _MASK32, (key >> 32) & _MASK32
    bits = hash32(hash32(hash32(place ^ low) ^ high) ^ hash32(layer + 1))
    # The first call keeps the bits it has always had.
    return bits if call == 0 else hash32(bits ^ hash32(call))


@custom_op("fedzmg::draws", mutates_args=())
def draws(keys: Tensor, layer: int, call: int, places: int, below: int | None = None) -> Tensor:
    """Draw random bits ``[*keys, places]`` of batches with these keys, or compare with a number."""
    if keys.is_cuda and HAS_TRITON:
        from fedzmg.models.kernels import triton_draws

        found = triton_draws.draws(keys.reshape(-1), layer, call, places, below)
    elif keys.device.type == "cpu":
        found = torch.from_numpy(_on_cpu(keys.reshape(-1).numpy(), layer, call, places, below))
    else:
        found = random_bits(keys[..., None], layer, torch.Size((places,)), keys.device, call)
        found = found if below is None else found < below
    return found.reshape(*keys.shape, places)


@draws.register_fake
def _(keys: Tensor, _layer: int, _call: int, places: int, below: int | None = None) -> Tensor:
    kind = torch.int64 if below is None else torch.bool
    return keys.new_empty(*keys.shape, places, dtype=kind)


@draws.register_vmap
def _(_info: Any, in_dims: Any, keys: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return draws(clients_first(keys, in_dims[0]), *rest), 0


def _on_cpu(
    keys: npt.NDArray[np.int64], layer: int, call: int, places: int, below: int | None
) -> npt.NDArray[Any]:
    """Draw in place on 32-bit words, whose products overflow as wanted."""
    kind: type[np.generic] = np.int64 if below is None else np.bool_
    out = np.empty((len(keys), places), dtype=kind)
    words, spare = np.empty((2, min(BLOCK, places)), dtype=np.uint32)
    for client, key in enumerate(keys.tolist()):
        others = [key >> 32 & _MASK32, hash32(layer + 1), *([hash32(call)] if call else [])]
        for first in range(0, places, BLOCK):
            last = min(first + BLOCK, places)
            bits, rest = words[: last - first], spare[: last - first]
            bits[:] = np.arange(first, last, dtype=np.uint32)
            bits ^= key & _MASK32
            _scramble(bits, rest)
            for other in others:
                bits ^= other
                _scramble(bits, rest)
            out[client, first:last] = bits if below is None else bits < below
    return out


def _scramble(bits: Words, spare: Words) -> None:
    """Apply :func:`hash32` in place."""
    for multiplier in MULTIPLIERS:
        np.right_shift(bits, 16, out=spare)
        np.bitwise_xor(bits, spare, out=bits)
        np.multiply(bits, multiplier, out=bits)
    np.right_shift(bits, 15, out=spare)
    np.bitwise_xor(bits, spare, out=bits)
