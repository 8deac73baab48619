"""The whole step of many tensors in one launch, as a Triton kernel.

A step is nothing but memory traffic: gradient, velocity and weight are read, the latter two are
written. A mean needs the gradient before the first velocity can be written, so a row of it, all
entries that share a mean, is held on chip. Rows of up to 8192 entries are read once, several to a
program if they are short; longer ones, and long ones that are no whole number of 16 bytes, are read
twice by one program, the second time from the cache. Where entries with one mean do not lie
together (embeddings), their sums come from outside.

One launch serves all tensors: a table says for every tile which tensor it belongs to, and for every
tensor where it lies. Launches are what costs most for models of many small tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 8
COLUMNS = 8
"""Numbers that describe one tensor: addresses of weight and velocity, and ``fused.Form``."""


@triton.jit
def _places(pointer, at, ALIGNED: tl.constexpr):
    places = pointer + at
    if ALIGNED:
        places = tl.multiple_of(places, (1, 16))  # so that 16 bytes are read at a time
    return places


@triton.jit
def _update(
    param, velocity, at, inside, mean, g, lr, momentum, kept, sign,
    ALIGNED: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Momentum, decay and step of entries whose gradient and mean are known."""
    g = (g - mean) * sign
    if BUFFER:
        here = _places(velocity, at, ALIGNED)
        v = tl.load(here, mask=inside, other=0.0).to(tl.float32) * momentum + g
        tl.store(here, v.to(velocity.dtype.element_ty), mask=inside)
        g = g + momentum * v if NESTEROV else v
    if STEP:
        here = _places(param, at, ALIGNED)
        w = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        tl.store(here, (w * kept - lr * g).to(param.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    param, grad, velocity, tile, rows, length, lr, momentum, kept, sign, unscale,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    BUFFER: tl.constexpr, NESTEROV: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Some rows that are held on chip: one pass."""
    if ALIGNED:
        # Arithmetic that changes nothing shows the compiler that all rows begin alike. A hint would
        # be put on a value that other branches use.
        length = length // 8 * 8
    row = tile * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < length)[None, :]
    at = row[:, None] * length + column[None, :]
    g = tl.load(_places(grad, at, ALIGNED), mask=inside, other=0.0).to(tl.float32) * unscale
    mean = tl.sum(g, axis=1) / length.to(tl.float32)
    _update(
        param, velocity, at, inside, mean[:, None], g, lr, momentum, kept, sign,
        ALIGNED, BUFFER, NESTEROV, STEP,
    )  # fmt: skip


@triton.jit
def _long_row(
    param, grad, velocity, row, length, lr, momentum, kept, sign, unscale,
    WIDTH: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row that is not: its gradient is read twice, the second time from the cache."""
    start = row * length
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, length, WIDTH):
        column = first + tl.arange(0, WIDTH)
        total += tl.load(grad + start + column, mask=column < length, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) * unscale / tl.maximum(length, 1).to(tl.float32)
    for first in range(0, length, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = column < length
        g = tl.load(grad + start + column, mask=inside, other=0.0).to(tl.float32) * unscale
        _update(
            param, velocity, start + column, inside, mean, g, lr, momentum, kept, sign,
            False, BUFFER, NESTEROV, STEP,
        )  # fmt: skip


@triton.jit
def _flat(
    param, grad, velocity, sums, tile, count, inner, outputs, inputs, span,
    lr, momentum, kept, sign, unscale,
    WIDTH: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Entries in the order of memory, with sums from outside or none."""
    at = tile * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * unscale
    # inputs is 0 for tensors that are not centred; their sums are never read.
    place = at // span * outputs + at // inner % outputs
    known = at < tl.where(inputs > 0, count, 0)
    mean = tl.load(sums + place, mask=known, other=0.0) * unscale
    mean = mean / tl.maximum(inputs, 1).to(tl.float32)
    _update(
        param, velocity, at, inside, mean, g, lr, momentum, kept, sign,
        False, BUFFER, NESTEROV, STEP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count_all", "lr", "momentum", "decay", "sign"])
def step(
    tiles, tensors, moving, count_all, lr, lr_at, momentum, decay, sign, scale_at, inf_at,
    DTYPE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    LR_AT: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr,
    BUFFER: tl.constexpr, NESTEROV: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of one tensor; see ``fused.Plan`` for the tables."""
    which = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    about = tensors + which * COLUMNS
    pointer = tl.pointer_type(DTYPE)
    param = tl.load(about).to(pointer)
    velocity = tl.load(about + 1).to(pointer)
    shape = tl.load(about + 2)
    length = tl.load(about + 3)
    count = tl.load(about + 4)
    inner = tl.load(about + 5)
    outputs = tl.load(about + 6)
    inputs = tl.load(about + 7)
    grad = tl.load(moving + which).to(pointer)
    sums = tl.load(moving + count_all + which).to(tl.pointer_type(tl.float32))
    if LR_AT:
        lr = tl.load(lr_at).to(tl.float32)
    kept = 1.0 - decay * lr
    unscale = 1.0
    if SCALED:
        unscale = 1.0 / tl.load(scale_at)
    if GUARDED:
        # An infinite gradient anywhere: nothing is inside any tile.
        count = tl.where(tl.load(inf_at) == 0.0, count, 0)
    if shape == 0:
        _flat(
            param, grad, velocity, sums, tile, count, inner, outputs, inputs, length,
            lr, momentum, kept, sign, unscale, TILE, BUFFER, NESTEROV, STEP,
        )  # fmt: skip
    elif shape == 16:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              TILE // 16, 16, False, BUFFER, NESTEROV, STEP)  # fmt: skip
    elif shape == 64:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              TILE // 64, 64, False, BUFFER, NESTEROV, STEP)  # fmt: skip
    elif shape == 256:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              TILE // 256, 256, True, BUFFER, NESTEROV, STEP)  # fmt: skip
    elif shape == 1024:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              TILE // 1024, 1024, True, BUFFER, NESTEROV, STEP)  # fmt: skip
    elif shape == 4096:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              1, 4096, True, BUFFER, NESTEROV, STEP)  # fmt: skip
    elif shape == 8192:
        _rows(param, grad, velocity, tile, count, length, lr, momentum, kept, sign, unscale,
              1, 8192, True, BUFFER, NESTEROV, STEP)  # fmt: skip
    else:
        _long_row(param, grad, velocity, tile, tl.where(count > 0, length, 0),
                  lr, momentum, kept, sign, unscale, TILE, BUFFER, NESTEROV, STEP)  # fmt: skip


HANDED = 8
"""Addresses that one launch of ``write`` takes as arguments."""


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g", "h", "first", "count"])
def write(table, first, count, a, b, c, d, e, f, g, h):
    """Write addresses into a table by their values: a recorded graph may not copy from the host."""
    if count > 0:
        tl.store(table + first, a)
    if count > 1:
        tl.store(table + first + 1, b)
    if count > 2:
        tl.store(table + first + 2, c)
    if count > 3:
        tl.store(table + first + 3, d)
    if count > 4:
        tl.store(table + first + 4, e)
    if count > 5:
        tl.store(table + first + 5, f)
    if count > 6:
        tl.store(table + first + 6, g)
    if count > 7:
        tl.store(table + first + 7, h)
