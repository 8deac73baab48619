"""Random bits as a function of an address, as a Triton kernel: they are made and used on chip."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedzmg.models.kernels.draws import MULTIPLIERS

FIRST, SECOND, THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
BLOCK = 1024


@triton.jit
def _hash(bits):
    """Apply ``hash32`` to 32-bit words, whose products overflow as wanted."""
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 16)) * SECOND
    bits = (bits ^ (bits >> 16)) * THIRD
    return bits ^ (bits >> 15)


@triton.jit(do_not_specialize=["layer", "call", "below"])
def _draws_kernel(
    keys, out, layer, call, below, places, COMPARE: tl.constexpr, BLOCK: tl.constexpr
):
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + client)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _hash(_hash(_hash(place.to(tl.uint32) ^ low) ^ high) ^ _hash((layer + 1).to(tl.uint32)))
    if call != 0:
        bits = _hash(bits ^ _hash(call.to(tl.uint32)))
    here = out + client * places + place
    if COMPARE:
        # Half the range is taken off both sides, so that the bound fits a signed word.
        drawn = (bits ^ 0x80000000).to(tl.int32, bitcast=True)
        tl.store(here, drawn < below, mask=place < places)
    else:
        tl.store(here, bits.to(tl.int64), mask=place < places)


def draws(keys: Tensor, layer: int, call: int, places: int, below: int | None) -> Tensor:
    """Draw random bits ``[clients, places]``, or compare them with a number."""
    compare = below is not None
    kind = torch.bool if compare else torch.int64
    out = torch.empty((len(keys), places), dtype=kind, device=keys.device)
    grid = (triton.cdiv(places, BLOCK), len(keys))
    _draws_kernel[grid](
        keys.contiguous(), out, layer, call, (below or 0) - (1 << 31), places,
        COMPARE=compare, BLOCK=BLOCK,
    )  # fmt: skip
    return out
