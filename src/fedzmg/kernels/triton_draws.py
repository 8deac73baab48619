"""Triton kernel of random bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedzmg.kernels.layers import MULTIPLIERS, of_call

FIRST, SECOND, THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def _hash(bits):
    """Apply ``hash32`` to 32-bit words, whose products overflow as wanted."""
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 16)) * SECOND
    bits = (bits ^ (bits >> 16)) * THIRD
    return bits ^ (bits >> 15)


@triton.jit(do_not_specialize=["salt", "factor", "below", "kept"])
def _draws_kernel(
    keys, out, salt, factor, below, kept, places, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Draw bits (``FORM`` 0), flags of those ``below`` (1), or zero for these and ``kept`` (2)."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + client)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    first = _hash(_hash(low) ^ high)
    bits = _hash(place.to(tl.uint32) * (_hash(first ^ low) >> 1 | 1) + first)
    # Half the range is taken off the salt and off both sides of the comparison: signed words.
    bits = (bits ^ salt.to(tl.uint32) ^ 0x80000000) * factor.to(tl.uint32)
    here = out + client * places + place
    drawn = (bits ^ 0x80000000).to(tl.int32, bitcast=True)
    if FORM == 0:
        tl.store(here, bits.to(tl.int64), mask=place < places)
    elif FORM == 1:
        tl.store(here, drawn < below, mask=place < places)
    else:
        tl.store(here, tl.where(drawn < below, 0.0, kept), mask=place < places)


def draws(
    keys: Tensor, layer: int, call: int, places: int, below: int | None = None,
    kind: torch.dtype | None = None, kept: float = 0.0,
) -> Tensor:  # fmt: skip
    """Draw bits ``[clients, places]``, flags of those ``below``, or zero for these and ``kept``."""
    form = 0 if below is None else 1 if kind is None else 2
    own = (torch.int64, torch.bool, kind)[form]
    out = torch.empty((len(keys), places), dtype=own, device=keys.device)
    grid, (salt, factor) = (triton.cdiv(places, 1024), len(keys)), of_call(layer, call)
    least = (below or 0) - (1 << 31)
    _draws_kernel[grid](
        keys.contiguous(), out, salt - (1 << 31), factor, least, kept, places, FORM=form, BLOCK=1024
    )
    return out
