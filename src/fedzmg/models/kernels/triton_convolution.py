"""Convolutions whose weights differ between clients, as Triton kernels.

A convolution is a product of matrices: pixels by (tap, channel) times (tap, channel) by outputs. No
patch is ever written out: a tile of pixels is read once per tap, shifted, mostly from cache. Images
are channels-last, so that what one pixel contributes is one aligned run of memory whatever the
shift. Three products make a training step; the one for the inputs is the forward one with turned
weights.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fedzmg.models.kernels.determinism import bits_are_kept


@triton.jit
def _pixels_kernel(
    x, weights, out,
    batch, height, width, out_height, out_width, pad_height, pad_width,
    C: tl.constexpr, FILTERS: tl.constexpr, TAPS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of output pixels of one client: sum over taps of shifted inputs times weights."""
    client = tl.program_id(1).to(tl.int64)
    out_area = out_height * out_width
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image, rest = place // out_area, place % out_area
    row, column = rest // out_width - pad_height, rest % out_width - pad_width
    real = place < batch * out_area
    outputs = tl.arange(0, OUTPUTS)
    x += client * batch * height * width * C
    weights += client * FILTERS * TAPS * C
    corner = ((image * height + row) * width + column) * C
    total = tl.zeros((PIXELS, OUTPUTS), dtype=tl.float32)
    for first in range(0, TAPS * C, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        if C % DEPTH == 0:  # the whole slice belongs to one tap
            tap = first // C
            r, c = row + tap // TAP_COLUMNS, column + tap % TAP_COLUMNS
            inside = real & (r >= 0) & (r < height) & (c >= 0) & (c < width)
            shift = (tap // TAP_COLUMNS * width + tap % TAP_COLUMNS) * C + depth - tap * C
            tile = tl.load(x + corner[:, None] + shift[None, :], mask=inside[:, None], other=0.0)
        else:
            tap = depth // C
            r = row[:, None] + (tap // TAP_COLUMNS)[None, :]
            c = column[:, None] + (tap % TAP_COLUMNS)[None, :]
            inside = real[:, None] & (r >= 0) & (r < height) & (c >= 0) & (c < width)
            shift = (tap // TAP_COLUMNS * width + tap % TAP_COLUMNS) * C + depth % C
            inside &= (depth < TAPS * C)[None, :]
            tile = tl.load(x + corner[:, None] + shift[None, :], mask=inside, other=0.0)
        w = tl.load(
            weights + outputs[None, :] * (TAPS * C) + depth[:, None],
            mask=(outputs < FILTERS)[None, :] & (depth < TAPS * C)[:, None],
            other=0.0,
        )
        total = tl.dot(tile, w, total, input_precision=PRECISION)
    target = out + (client * batch * out_area + place)[:, None] * FILTERS + outputs[None, :]
    tl.store(
        target, total.to(out.dtype.element_ty), mask=real[:, None] & (outputs < FILTERS)[None, :]
    )


@triton.jit
def _weights_kernel(
    x, signal, out,
    batch, height, width, out_height, out_width, pad_height, pad_width, splits,
    C: tl.constexpr, FILTERS: tl.constexpr, TAPS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """The gradient of some (tap, channel) columns, over one share of the pixels of one client."""
    client = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    out_area = out_height * out_width
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tap = column // C
    tap_row, tap_column = tap // TAP_COLUMNS, tap % TAP_COLUMNS
    shift = (tap_row * width + tap_column) * C + column % C
    known = column < TAPS * C
    outputs = tl.arange(0, OUTPUTS)
    x += client * batch * height * width * C
    signal += client * batch * out_area * FILTERS
    total = tl.zeros((OUTPUTS, COLUMNS), dtype=tl.float32)
    end = batch * out_area
    share = tl.cdiv(tl.cdiv(end, splits), PIXELS) * PIXELS
    for first in range(split * share, min(end, (split + 1) * share), PIXELS):
        place = first + tl.arange(0, PIXELS)
        image, rest = place // out_area, place % out_area
        row, col = rest // out_width - pad_height, rest % out_width - pad_width
        real = place < end
        r, c = row[:, None] + tap_row[None, :], col[:, None] + tap_column[None, :]
        inside = real[:, None] & known[None, :] & (r >= 0) & (r < height) & (c >= 0) & (c < width)
        corner = ((image * height + row) * width + col) * C
        tile = tl.load(x + corner[:, None] + shift[None, :], mask=inside, other=0.0)
        back = tl.load(
            signal + place[:, None] * FILTERS + outputs[None, :],
            mask=real[:, None] & (outputs < FILTERS)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(back), tile, total, input_precision=PRECISION)
    target = out + (client * splits + split) * FILTERS * TAPS * C
    tl.store(
        target + outputs[:, None] * (TAPS * C) + column[None, :],
        total,
        mask=(outputs < FILTERS)[:, None] & known[None, :],
    )


TIMED = 5
_SHAPE = ["batch", "height", "width", "C", "FILTERS", "TAPS", "PRECISION"]


def _tuned(kernel: Any, configs: list[Any]) -> Any:
    """The kernel with its fastest tile, measured once per shape; interpreted: with the first."""
    chosen = configs[:1] if isinstance(kernel, InterpretedFunction) else configs
    return triton.autotune(chosen, key=_SHAPE, do_bench=_milliseconds)(kernel)


def _milliseconds(call: Any, quantiles: Any) -> list[float]:
    """A few calls tell tiles apart; Triton's own way takes a tenth of a second for each."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TIMED):
        call()
    end.record()
    end.synchronize()
    return [begin.elapsed_time(end) / TIMED] * len(quantiles)


def _launch(tuned: Any, grid: Any, *args: Any, **constants: Any) -> None:
    """Run a kernel with its fastest tile, or with its first where bits must not move."""
    if bits_are_kept():
        tuned.fn[grid](*args, **constants, **tuned.configs[0].all_kwargs())
    else:
        tuned[grid](*args, **constants)


_pixels = _tuned(
    _pixels_kernel,
    [
        triton.Config({"PIXELS": pixels, "DEPTH": 32}, num_warps=warps, num_stages=stages)
        for pixels, warps, stages in ((128, 4, 3), (256, 8, 2), (64, 4, 3))
    ],
)
_weights = _tuned(
    _weights_kernel,
    [
        triton.Config({"PIXELS": pixels}, num_warps=warps, num_stages=stages)
        for pixels, warps, stages in ((64, 4, 2), (32, 4, 3), (64, 8, 2))
    ],
)


def _padded(size: int) -> int:
    """The next power of two that a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(size)))


def convolve(
    x: Tensor, w: Tensor, padding: tuple[int, int], precision: str, *, turned: bool = False
) -> Tensor:
    """Outputs ``[clients, batch, height, width, FILTERS]`` of inputs in the same order of axes.

    ``turned`` weights give the gradient of the inputs from that of the outputs.
    """
    clients, batch, height, width, channels = x.shape
    tap_rows, tap_columns = w.shape[-2:]
    rows, columns = padding
    if turned:
        w = w.flip(-1, -2).transpose(1, 2)
        rows, columns = tap_rows - 1 - rows, tap_columns - 1 - columns
    outputs = w.shape[1]
    flat = w.permute(0, 1, 3, 4, 2).contiguous()
    out_height = height + 2 * rows - tap_rows + 1
    out_width = width + 2 * columns - tap_columns + 1
    out = x.new_empty(clients, batch, out_height, out_width, outputs)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(batch * out_height * out_width, meta["PIXELS"]), clients

    _launch(
        _pixels, grid, x, flat, out,
        batch, height, width, out_height, out_width, rows, columns,
        C=channels, FILTERS=outputs, TAPS=tap_rows * tap_columns, TAP_COLUMNS=tap_columns,
        OUTPUTS=_padded(outputs), PRECISION=precision,
    )  # fmt: skip
    return out


def weight_gradient(
    x: Tensor, signal: Tensor, taps: tuple[int, int], padding: tuple[int, int], precision: str
) -> Tensor:
    """Gradient of the weights ``[clients, FILTERS, C, rows, columns]``, in float32."""
    clients, batch, height, width, channels = x.shape
    out_height, out_width, outputs = signal.shape[2:]
    number = taps[0] * taps[1]
    wide = min(128 if outputs <= 64 else 64, _padded(number * channels))
    blocks = triton.cdiv(number * channels, wide)
    # Few clients alone would leave most of the card idle: share a client's pixels out.
    splits = max(1, min(batch * out_height * out_width // 512, 528 // (clients * blocks)))
    out = torch.empty(
        (clients, splits, outputs, *taps, channels), dtype=torch.float32, device=x.device
    )
    _launch(
        _weights, (blocks, splits, clients), x, signal, out,
        batch, height, width, out_height, out_width, *padding, splits,
        C=channels, FILTERS=outputs, TAPS=number, TAP_COLUMNS=taps[1],
        OUTPUTS=_padded(outputs), COLUMNS=wide, PRECISION=precision,
    )  # fmt: skip
    summed = out.sum(1) if splits > 1 else out[:, 0]
    return summed.permute(0, 1, 4, 2, 3)
