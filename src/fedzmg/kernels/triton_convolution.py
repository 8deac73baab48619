"""Convolutions whose weights differ between clients, as Triton kernels.

A convolution is a product of matrices: pixels by (tap, channel) times (tap, channel) by outputs. No
patch is ever written out: a tile of pixels is read once per tap, shifted, mostly from cache. Images
are channels-last, so that what one pixel contributes is one aligned run of memory whatever the
shift. Three products make a training step; the one for the inputs is the forward one with turned
weights.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fedzmg.kernels.precision import bits_are_kept, crowd, milliseconds


@triton.jit
def _pixels_kernel(
    x, weights, out, batch, crowd,  # noqa: ARG001  # for the choice of tiles
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_COLUMNS: tl.constexpr,
    C: tl.constexpr, FILTERS: tl.constexpr, TAPS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, DEPTH: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of output pixels of one client: shifted inputs times weights, over taps."""
    RUN: tl.constexpr = BYTES * 8 // x.dtype.element_ty.primitive_bitwidth
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    line = place // OUT_WIDTH
    row, column = line % OUT_HEIGHT - PAD_ROWS, place % OUT_WIDTH - PAD_COLUMNS
    real = place < batch * (OUT_HEIGHT * OUT_WIDTH)
    outputs = tl.arange(0, OUTPUTS)
    x += client * batch * (HEIGHT * WIDTH * C)
    weights += client * (FILTERS * TAPS * C)
    corner = ((line // OUT_HEIGHT * HEIGHT + row) * WIDTH + column) * C
    row = tl.where(real, row, HEIGHT)  # a row that is outside for every tap
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((PIXELS, OUTPUTS), dtype=tl.float32)
    for first in range(0, TAPS * C, DEPTH):
        known = (outputs < FILTERS)[None, :]
        if C % DEPTH == 0:  # the whole slice belongs to one tap
            tap = first // C
            r, c = row + tap // TAP_COLUMNS, column + tap % TAP_COLUMNS
            inside = ((r >= 0) & (r < HEIGHT) & (c >= 0) & (c < WIDTH))[:, None]
            shift = (tap // TAP_COLUMNS * WIDTH + tap % TAP_COLUMNS) * C + first % C
            shift = tl.multiple_of(shift, DEPTH)
            at = tl.max_contiguous(corner[:, None] + depth[None, :], [1, RUN])
            tile = tl.load(x + shift + at, mask=inside, other=0.0)
        else:
            tap = (first + depth) // C
            r = row[:, None] + (tap // TAP_COLUMNS)[None, :]
            c = column[:, None] + (tap % TAP_COLUMNS)[None, :]
            inside = (tap < TAPS)[None, :] & (r >= 0) & (r < HEIGHT) & (c >= 0) & (c < WIDTH)
            shift = (tap // TAP_COLUMNS * WIDTH + tap % TAP_COLUMNS) * C + (first + depth) % C
            tile = tl.load(x + corner[:, None] + shift[None, :], mask=inside, other=0.0)
            known &= (tap < TAPS)[:, None]
        of = outputs[None, :] * (TAPS * C) + depth[:, None]
        w = tl.load(weights + first + of, mask=known, other=0.0)
        total = tl.dot(tile, w, total, input_precision=PRECISION)
    target = client * batch * (OUT_HEIGHT * OUT_WIDTH) + place
    written = real[:, None] & (outputs < FILTERS)[None, :]
    to = out + target[:, None] * FILTERS + outputs[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def _weights_kernel(
    x, signal, out, batch, crowd, splits,  # noqa: ARG001
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    PAD_ROWS: tl.constexpr, PAD_COLUMNS: tl.constexpr,
    C: tl.constexpr, FILTERS: tl.constexpr, TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    SHIFTED: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of weights, over one share of the pixels of one client.

    ``SHIFTED``: of a tap's shift, the column moves the inputs and the row moves the gradient of the
    outputs, the other way. So a tile per column of taps and a tile per row of taps are read, each
    is multiplied with each (an accumulator per tap), and whether a pixel is inside does not depend
    on the channel. Pixels are counted by rows of the inputs and columns of the outputs.

    Otherwise (few channels) all taps' channels stand side by side as columns of one matrix, cut in
    pieces, and pixels are counted as those of the outputs.

    A program takes one of ``BLOCKS`` of columns, of ``GROUPS`` of rows of taps and of blocks of
    filters.
    """
    RUN: tl.constexpr = BYTES * 8 // x.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = HEIGHT if SHIFTED else OUT_HEIGHT
    STEP: tl.constexpr = C if SHIFTED else COLUMNS  # from one piece to the next
    SPAN: tl.constexpr = COLUMNS if SHIFTED else PIECES * COLUMNS
    part, split = tl.program_id(0), tl.program_id(1)
    client = tl.program_id(2).to(tl.int64)
    column = part % BLOCKS * SPAN + tl.arange(0, COLUMNS)
    first_tap = part // BLOCKS % GROUPS * ROWS
    output = part // (BLOCKS * GROUPS) * OUTPUTS + tl.arange(0, OUTPUTS)
    x += client * batch * (HEIGHT * WIDTH * C)
    signal += client * batch * (OUT_HEIGHT * OUT_WIDTH * FILTERS)
    totals = ()  # type: Any
    for _ in tl.static_range(ROWS * PIECES):
        totals += (tl.zeros((COLUMNS, OUTPUTS), dtype=tl.float32),)
    end = batch * (LINES * OUT_WIDTH)
    share = tl.cdiv(tl.cdiv(end, splits), PIXELS) * PIXELS
    for first in range(split * share, min(end, (split + 1) * share), PIXELS):
        place = first + tl.arange(0, PIXELS)
        line = place // OUT_WIDTH
        image, row = line // LINES, line % LINES
        left = place % OUT_WIDTH - PAD_COLUMNS
        real = place < end
        if SHIFTED:
            corner = (place + line * (WIDTH - OUT_WIDTH) - PAD_COLUMNS) * C
            near = x + tl.max_contiguous(corner[None, :] + column[:, None], [RUN, 1])
            back_line = image * (OUT_HEIGHT - HEIGHT) + PAD_ROWS - first_tap
            start = (place + back_line * OUT_WIDTH) * FILTERS
        else:
            corner = ((image * HEIGHT + row - PAD_ROWS) * WIDTH + left) * C
            near = x + corner[None, :]
            start = place * FILTERS
        far = signal + tl.max_contiguous(start[:, None] + output[None, :], [1, RUN])
        tiles = ()  # type: Any
        for piece in tl.static_range(PIECES):
            if SHIFTED:
                c = left + piece
                inside = (real & (c >= 0) & (c < WIDTH))[None, :]
                at = near + piece * C
            else:
                tap, channel = (column + piece * STEP) // C, (column + piece * STEP) % C
                r = (row - PAD_ROWS)[None, :] + (tap // TAP_COLUMNS)[:, None]
                c = left[None, :] + (tap % TAP_COLUMNS)[:, None]
                inside = real[None, :] & (r >= 0) & (r < HEIGHT) & (c >= 0) & (c < WIDTH)
                inside &= (tap < TAP_ROWS * TAP_COLUMNS)[:, None]
                shift = (tap // TAP_COLUMNS * WIDTH + tap % TAP_COLUMNS) * C + channel
                at = near + shift[:, None]
            tiles += (tl.load(at, mask=inside, other=0.0),)
        backs = ()  # type: Any
        for tap_row in tl.static_range(ROWS):
            inside = real
            if SHIFTED:
                r = row + PAD_ROWS - first_tap - tap_row
                inside &= (r >= 0) & (r < OUT_HEIGHT)
            known = inside[:, None] & (output < FILTERS)[None, :]
            at = far - tap_row * (OUT_WIDTH * FILTERS)
            backs += (tl.load(at, mask=known, other=0.0),)
        sums = ()  # type: Any
        for i in tl.static_range(ROWS * PIECES):
            tile, back = tiles[i % PIECES], backs[i // PIECES]
            sums += (tl.dot(tile, back, totals[i], input_precision=PRECISION),)
        totals = sums
    DEPTH: tl.constexpr = TAP_ROWS * TAP_COLUMNS * C
    out += (client * splits + split) * (FILTERS * DEPTH)
    for i in tl.static_range(ROWS * PIECES):
        flat = (first_tap + i // PIECES) * (TAP_COLUMNS * C) + i % PIECES * STEP + column
        known = (flat < DEPTH)[:, None] & (output < FILTERS)[None, :]
        tl.store(out + flat[:, None] + output[None, :] * DEPTH, totals[i], mask=known)


_SHAPE = ["batch", "crowd", "HEIGHT", "WIDTH", "C", "FILTERS", "TAP_COLUMNS", "PRECISION"]


def _tuned(kernel: Any, *tiles: tuple[int, int, int, int], **more: int) -> Any:
    """Choose the fastest tile, measured once per shape; interpreted: the first."""
    configs = [
        triton.Config({"PIXELS": pixels, "BYTES": size, **more}, num_warps=warps, num_stages=stages)
        for pixels, size, warps, stages in tiles
    ]
    chosen = configs[:1] if isinstance(kernel, InterpretedFunction) else configs
    tune = triton.autotune(
        chosen, key=_SHAPE, cache_results=True,  # Triton's own timing takes 0.1 s for each
        do_bench=lambda call, quantiles: [min(milliseconds(call))] * len(quantiles),
    )  # fmt: skip
    return tune(kernel)


def _launch(tuned: Any, grid: Any, *args: Any, **constants: Any) -> None:
    """Run a kernel with its fastest tile, or with its first where bits must not move."""
    if bits_are_kept():
        tuned.fn[grid](*args, **constants, **tuned.configs[0].all_kwargs())
    else:
        tuned[grid](*args, **constants)


# Copies of 16 bytes pass by the first-level cache, those of 8 fill it: twice the instructions, but
# a shifted tile is then mostly found there. Which is faster depends on the shape.
_pixels = _tuned(_pixels_kernel, (128, 16, 4, 3), (256, 16, 8, 2), (128, 8, 4, 2), DEPTH=32)
# Two warps for tiles of 32 filters, four for 64: Triton cuts products like these along one side,
# and more warps would repeat each other. Taller tiles would go to the instructions of whole warp
# groups, which want 32-bit numbers pixel by pixel in memory; ours lie channel by channel.
_weights = {
    n: _tuned(_weights_kernel, (32, 16, n, 3), (32, 8, n, 3), (16, 8, n, 4)) for n in (2, 4)
}


def _padded(size: int) -> int:
    """Return the next power of two that a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(size)))


def compile_ahead(
    x: Tensor, w: Tensor, padding: tuple[int, int], precision: str, *, learns: bool, inner: bool
) -> None:
    """Compile the kernels of a layer with all their tiles, side by side."""

    def launch(tuned: Any, _grid: Any, *args: Any, **constants: Any) -> None:
        tuned.warmup(*args, grid=(1,), **constants)

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        out = convolve(x, w, padding, precision, launch=launch).permute(0, 1, 3, 4, 2)
        if learns:
            weight_gradient(x, out, (w.shape[3], w.shape[4]), padding, precision, launch=launch)
        if inner:
            convolve(out, w, padding, precision, turned=True, launch=launch)


def convolve(
    x: Tensor, w: Tensor, padding: tuple[int, int], precision: str, *, turned: bool = False,
    launch: Callable[..., None] = _launch,
) -> Tensor:  # fmt: skip
    """Convolve channels-last images to ``[clients, batch, FILTERS, ...]``, which is no view."""
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
    shape = clients, batch, outputs, out_height, out_width
    out = torch.empty_permuted(shape, (0, 1, 3, 4, 2), dtype=x.dtype, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(batch * out_height * out_width, meta["PIXELS"]), clients

    launch(
        _pixels, grid, x, flat, out, batch, crowd(clients),
        HEIGHT=height, WIDTH=width, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        PAD_ROWS=rows, PAD_COLUMNS=columns,
        C=channels, FILTERS=outputs, TAPS=tap_rows * tap_columns, TAP_COLUMNS=tap_columns,
        OUTPUTS=_padded(outputs), PRECISION=precision,
    )  # fmt: skip
    return out


def weight_gradient(
    x: Tensor, signal: Tensor, taps: tuple[int, int], padding: tuple[int, int], precision: str, *,
    launch: Callable[..., None] = _launch,
) -> Tensor:  # fmt: skip
    """Compute the weight gradient ``[clients, FILTERS, C, rows, columns]``, in float32."""
    clients, batch, height, width, channels = x.shape
    out_height, out_width, outputs = signal.shape[2:]
    tile = _tile(channels, outputs, taps, precision)
    parts = tile["BLOCKS"] * tile["GROUPS"] * triton.cdiv(outputs, tile["OUTPUTS"])
    warps = 4 if tile["OUTPUTS"] == 64 else 2
    lines = height if tile["SHIFTED"] else out_height
    splits = _splits(clients * parts, batch * lines * out_width, warps)
    shape = clients, splits, outputs, *taps, channels
    out = x.new_empty(shape, dtype=torch.float32)
    launch(
        _weights[warps], (parts, splits, clients), x, signal, out, batch, crowd(clients), splits,
        HEIGHT=height, WIDTH=width, OUT_HEIGHT=out_height, OUT_WIDTH=out_width,
        PAD_ROWS=padding[0], PAD_COLUMNS=padding[1],
        C=channels, FILTERS=outputs, TAP_ROWS=taps[0], TAP_COLUMNS=taps[1],
        **tile, PRECISION=precision,
    )  # fmt: skip
    summed = out.sum(1) if splits > 1 else out[:, 0]
    return summed.permute(0, 1, 4, 2, 3)


def _tile(channels: int, outputs: int, taps: tuple[int, int], precision: str) -> dict[str, int]:
    """Size the tile of one program of the weight gradient; see the kernel."""
    # So many accumulators of 32 by 64 fit in the registers; sums without tensor cores take more.
    most = 5 if precision == "ieee" else 10
    depth = taps[0] * taps[1] * channels
    columns = next((n for n in (32, 16) if channels % n == 0), min(32, _padded(depth)))
    shifted = channels % columns == 0 and taps[1] <= most
    pieces = taps[1] if shifted else min(most, triton.cdiv(depth, columns))
    groups = triton.cdiv(taps[0], most // pieces) if shifted else 1
    return {
        "SHIFTED": shifted, "COLUMNS": columns, "PIECES": pieces,
        "ROWS": triton.cdiv(taps[0], groups) if shifted else 1,
        "BLOCKS": channels // columns if shifted else triton.cdiv(depth, pieces * columns),
        "GROUPS": groups, "OUTPUTS": min(64, _padded(outputs)),
    }  # fmt: skip


@cache
def _splits(programs: int, pixels: int, warps: int) -> int:
    """Count the shares of a client's pixels that keep a GPU busy to the end."""
    # Programs run in waves of as many as a large GPU holds (a constant: bits depend on shapes
    # alone). Each costs its tiles and something for its start and for the sum over shares.
    wave, tiles, fixed = 132 * 8 // warps, triton.cdiv(pixels, 32), 8
    return min(
        range(1, max(1, tiles // fixed) + 1),
        key=lambda n: triton.cdiv(programs * n, wave) * (triton.cdiv(tiles, n) + fixed),
    )
