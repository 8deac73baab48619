"""Batch normalisation whose statistics differ between clients, as Triton kernels.

A program normalises some channels of one client. It reads their pixels three times, mostly from
cache: for mean, variance and outputs. Images may have any memory layout; pixels are counted in the
order of memory, and channels that are next to each other are read together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton compiles no kernel for each of these, which differ between layers.
SIZES = ["batch", "channels", "n0", "n1", "n2", "size", "step", "s0", "s1", "s2",
         "back_size", "back_step", "b0", "b1", "b2"]  # fmt: skip


@triton.jit
def _tile(
    images, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2,
    AXIS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Load pixels, zeros for padding; return them, what is real, where it is and what is inside."""
    at = first + tl.arange(0, PIXELS)
    i0, i1, i2 = at // (n1 * n2), at // n2 % n1, at % n2
    image = i0 if AXIS == 0 else (i1 if AXIS == 1 else i2)
    kept = tl.load(real + image, mask=at < n0 * n1 * n2, other=0)[:, None] != 0
    inside = (at < n0 * n1 * n2)[:, None] & (channel < channels)[None, :]
    place = (i0 * s0 + i1 * s1 + i2 * s2)[:, None] + (channel * step)[None, :]
    values = tl.load(images + place, mask=kept & inside, other=0.0)
    return values.to(tl.float32), kept, place, inside


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x, real, weight, bias, old_mean, old_var, out, means, scales, new_mean, new_var,
    momentum, eps, batch, channels, n0, n1, n2, size, step, s0, s1, s2,
    AXIS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Normalise, and move the running statistics."""
    client = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    own, known, number = client * channels + channel, channel < channels, n0 * n1 * n2
    x += client * size
    out += client * size
    real += client * batch
    sums = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    counts = tl.zeros((PIXELS, 1), dtype=tl.float32)
    for first in range(0, number, PIXELS):
        values, kept, place, inside = _tile(
            x, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2, AXIS, PIXELS
        )
        sums += values
        counts += kept.to(tl.float32)
    count = tl.sum(tl.sum(counts, 1), 0)
    total = tl.maximum(count, 1.0)
    mean = tl.sum(sums, 0) / total
    sums = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for first in range(0, number, PIXELS):
        values, kept, place, inside = _tile(
            x, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2, AXIS, PIXELS
        )
        centred = tl.where(kept, values - mean[None, :], 0.0)
        sums += centred * centred
    var = tl.sum(sums, 0) / total
    scale = 1.0 / tl.sqrt(var + eps)
    w = tl.load(weight + own, mask=known, other=0.0)
    b = tl.load(bias + own, mask=known, other=0.0)
    for first in range(0, number, PIXELS):
        values, kept, place, inside = _tile(
            x, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2, AXIS, PIXELS
        )
        result = (values - mean[None, :]) * (scale * w)[None, :] + b[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)
    tl.store(means + own, mean, mask=known)
    tl.store(scales + own, scale, mask=known)
    m, v = tl.load(old_mean + own, mask=known), tl.load(old_var + own, mask=known)
    unbiased = var * total / tl.maximum(total - 1.0, 1.0)
    share = tl.where(count > 1.0, momentum, 0.0)
    tl.store(new_mean + own, m + share * (mean - m), mask=known)
    tl.store(new_var + own, v + share * (unbiased - v), mask=known)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    x, signal, real, weight, means, scales, for_x, for_weight, for_bias,
    batch, channels, n0, n1, n2, size, step, s0, s1, s2,
    back_size, back_step, b0, b1, b2,
    AXIS: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of images, weights and biases."""
    client = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    own, known, number = client * channels + channel, channel < channels, n0 * n1 * n2
    x += client * size
    for_x += client * size
    signal += client * back_size
    real += client * batch
    mean = tl.load(means + own, mask=known, other=0.0)[None, :]
    scale = tl.load(scales + own, mask=known, other=0.0)[None, :]
    w = tl.load(weight + own, mask=known, other=0.0)[None, :]
    for_b = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    for_w = tl.zeros((PIXELS, CHANNELS), dtype=tl.float32)
    counts = tl.zeros((PIXELS, 1), dtype=tl.float32)
    for first in range(0, number, PIXELS):
        values, kept, place, inside = _tile(
            x, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2, AXIS, PIXELS
        )
        back, kept, _, _ = _tile(
            signal, real, first, channel, channels, n0, n1, n2, back_step, b0, b1, b2, AXIS, PIXELS
        )
        for_b += back
        for_w += back * (values - mean) * scale
        counts += kept.to(tl.float32)
    total = tl.maximum(tl.sum(tl.sum(counts, 1), 0), 1.0)
    sum_b, sum_w = tl.sum(for_b, 0), tl.sum(for_w, 0)
    for first in range(0, number, PIXELS):
        values, kept, place, inside = _tile(
            x, real, first, channel, channels, n0, n1, n2, step, s0, s1, s2, AXIS, PIXELS
        )
        back, kept, _, _ = _tile(
            signal, real, first, channel, channels, n0, n1, n2, back_step, b0, b1, b2, AXIS, PIXELS
        )
        slope = back - (sum_b[None, :] + (values - mean) * scale * sum_w[None, :]) / total
        slope = tl.where(kept, slope * scale * w, 0.0)
        tl.store(for_x + place, slope.to(for_x.dtype.element_ty), mask=inside)
    tl.store(for_weight + own, sum_w, mask=known)
    tl.store(for_bias + own, sum_b, mask=known)


def _form(x: Tensor) -> tuple[list[int], dict[str, int], tuple[int, int]]:
    """Order the axes of pixels as in memory; choose the tile and the grid."""
    axes = sorted((1, 3, 4), key=x.stride, reverse=True)
    pixels, channels = x[0, :, 0].numel(), x.shape[2]
    beside = 16 if x.stride(2) == 1 else 1
    # Few sizes, since every one is compiled.
    rows = (1024 if pixels > 256 else 128) // beside
    tile = {"AXIS": axes.index(1), "PIXELS": rows, "CHANNELS": beside}
    return axes, tile, (triton.cdiv(channels, beside), len(x))


def _strides(x: Tensor, axes: list[int]) -> list[int]:
    return [x.stride(axis) for axis in (0, 2, *axes)]


def forward(
    x: Tensor, real: Tensor, own: list[Tensor], momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, means, scales and moved statistics; ``own``: weights, biases, statistics."""
    axes, tile, grid = _form(x)
    mean, scale = (torch.empty_like(own[0], dtype=torch.float32) for _ in range(2))
    found = torch.empty_like(x), mean, scale, torch.empty_like(own[2]), torch.empty_like(own[3])
    sizes = [x.shape[axis] for axis in (1, 2, *axes)]
    _forward_kernel[grid](x, real, *own, *found, momentum, eps, *sizes, *_strides(x, axes), **tile)
    return found


def backward(
    x: Tensor, signal: Tensor, real: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of images, weights and biases."""
    axes, tile, grid = _form(x)
    found = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    sizes = [x.shape[axis] for axis in (1, 2, *axes)]
    strides = *_strides(x, axes), *_strides(signal, axes)
    _backward_kernel[grid](x, signal, real, weight, means, scales, *found, *sizes, *strides, **tile)
    return found
