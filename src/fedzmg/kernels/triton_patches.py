"""Patches of images cut and added up by Triton kernels: one launch each, padding included."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fedzmg.kernels.precision import within_reach

BLOCK = 1024  # values that one program computes
# Triton compiles no kernel for each of these, which differ between layers.
SIZES = ["high", "wide", "out_high", "out_wide", "tall", "broad", "down", "across", "rows",
         "columns", "client_step", "channel_step", "row_step", "column_step", "beside"]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _cut_kernel(
    x, out, size, batch, high, wide, out_high, out_wide, tall, broad, down, across, rows, columns,
    client_step, image_step, channel_step, row_step, column_step, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write patches ``[client, channel, tap row, tap column, row, column, image]``."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel = at // batch
    tap = pixel // (out_high * out_wide)
    row = pixel // out_wide % out_high * down + tap // broad % tall - rows
    column = pixel % out_wide * across + tap % broad - columns
    inside = (at < size) & (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    place = at % batch * image_step + tap // (tall * broad) * channel_step
    place += row * row_step + column * column_step
    values = tl.load(x + client * client_step + place, mask=inside, other=0.0)
    tl.store(out + client * size + at, values, mask=at < size)


@triton.jit(do_not_specialize=SIZES)
def _add_kernel(
    patches, out, size, batch, high, wide, out_high, out_wide, tall, broad, down, across, rows,
    columns, beside, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what all patches have of a pixel; images ``[client, channel, row, column, image]``."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pixel, image = at // batch, at % batch
    channel, row = pixel // (high * wide), pixel // wide % high + rows
    column = pixel % wide + columns
    patches += client * (size // (high * wide)) * (tall * broad * out_high * out_wide)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in range(tall * broad):
        below, right = row - tap // broad, column - tap % broad
        r, c = below // down, right // across
        inside = (at < size) & (below >= 0) & (r * down == below) & (r < out_high)
        inside = inside & (right >= 0) & (c * across == right) & (c < out_wide)
        place = ((channel * (tall * broad) + tap) * out_high + r) * out_wide + c
        total += tl.load(patches + place * batch + image, mask=inside, other=0.0).to(tl.float32)
    where = client * (size // batch * beside) + pixel * beside + image
    tl.store(out + where, total.to(out.dtype.element_ty), mask=at < size)


def cut(form: Any, x: Tensor) -> Tensor:
    """Cut images ``[clients, batch, channels, ...]`` of any layout into patches."""
    x, batch, size = within_reach(x), x.shape[1], form.rows * form.columns * x.shape[1]
    out = x.new_empty(len(x), form.rows, form.columns * batch)
    grid = triton.cdiv(size, BLOCK), len(x)
    _cut_kernel[grid](x, out, size, batch, *_numbers(form), *x.stride(), BLOCK=BLOCK)
    return out


def add(form: Any, images: Tensor, patches: Tensor) -> None:
    """Fill images, some of all of a batch and the batch last, with the sums of their patches."""
    batch, size = images.shape[-1], images[0].numel()
    grid = triton.cdiv(size, BLOCK), len(images)
    given = patches.contiguous(), images, size, batch
    _add_kernel[grid](*given, *_numbers(form), images.stride(-2), BLOCK=BLOCK)


def _numbers(form: Any) -> list[int]:
    return [*form.inside, *form.out, *form.taps, *form.stride, *form.padding]
