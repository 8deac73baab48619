"""Triton kernel for the step of many tensors in one launch.

A step is memory traffic, and the mean must be known before the first velocity is written. So a row,
all entries that share a mean, is held on chip and read once if it is short. Long rows and columns
with one mean each (embeddings) are read twice, the second time from the cache. torch computes the
other sums. A table maps every tile to its tensor, another has the tensors' addresses.

A tile issues all loads first, since a load after a reduction or a store cannot overtake it.
"""

import torch
import triton
import triton.language as tl

from fedzmg.optim import fused

OPTIONS = {"num_warps": 8} if torch.version.hip else {"num_warps": 8, "maxnreg": 80}
"""Registers for three programs per multiprocessor, without spills."""
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
FIELDS = tl.constexpr(9)  # of a tensor: addresses of weight, velocity, sums, and fused.Form
TILE, TAIL, STRIPE = tl.constexpr(fused.TILE), tl.constexpr(fused.TAIL), tl.constexpr(fused.STRIPE)


@triton.jit
def _places(pointer, at, ALIGNED: tl.constexpr):
    places = pointer + at
    if ALIGNED:
        places = tl.multiple_of(places, (1, 16))  # so that 16 bytes are read at a time
    return places


@triton.jit
def _read(pointer, at, inside, ALIGNED: tl.constexpr):
    return tl.load(_places(pointer, at, ALIGNED), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _read_state(param, velocity, at, inside, ALIGNED: tl.constexpr, BUFFER: tl.constexpr):
    """Load velocity, if there is one, and weight."""
    v = 0.0
    if BUFFER:
        v = _read(velocity, at, inside, ALIGNED)
    return v, _read(param, at, inside, ALIGNED)


@triton.jit
def _update(
    param, velocity, at, inside, g, v, w, rates,
    ALIGNED: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Apply momentum, decay and step to entries with a known centred gradient."""
    lr, momentum, kept, sign = rates
    g = g * sign
    if BUFFER:
        v = v * momentum + g
        here = _places(velocity, at, ALIGNED)
        tl.store(here, v.to(velocity.dtype.element_ty), mask=inside)
        g = g + momentum * v if NESTEROV else v
    here = _places(param, at, ALIGNED)
    tl.store(here, (w * kept - lr * g).to(param.dtype.element_ty), mask=inside)


@triton.jit
def _moved(param, grad, velocity, by):
    """Move pointers to the start of a tile, so that offsets within it fit into 32 bits."""
    return param + by, grad + by, velocity + by


@triton.jit
def _left(count, first):
    """Count what is left from the first of a tile on, in 32 bits."""
    return tl.minimum(tl.maximum(count - first, 0), TILE).to(tl.int32)


@triton.jit
def _block(row, column, rows, columns):
    """Return the offsets of a block of a matrix, and a mask of those inside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row[:, None] * columns + column[None, :], inside


@triton.jit
def _rows(
    param, grad, velocity, tile, rows, length, rates, unscale,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update rows of up to a width, held on chip: one pass.

    Lengths on chip are powers of two. Aligned rows may be an eighth longer: a second, short tile
    holds the rest of a 3 x 3 convolution.
    """
    HEIGHT: tl.constexpr = TILE // WIDTH if WIDTH < TILE else 1
    first = tile * HEIGHT
    param, grad, velocity = _moved(param, grad, velocity, first * length)
    rows, length = _left(rows, first), length.to(tl.int32)
    if ALIGNED:
        # This no-op arithmetic tells the compiler that rows are aligned. A hint would also apply
        # to other branches.
        length = length // 8 * 8
    row = tl.arange(0, HEIGHT)
    at, inside = _block(row, tl.arange(0, WIDTH), rows, length)
    g = _read(grad, at, inside, ALIGNED) * unscale
    if ALIGNED:
        at_2, inside_2 = _block(row, WIDTH + tl.arange(0, WIDTH // TAIL), rows, length)
        g_2 = _read(grad, at_2, inside_2, True) * unscale
    v, w = _read_state(param, velocity, at, inside, ALIGNED, BUFFER)
    total = tl.sum(g, axis=1)
    if ALIGNED:
        v_2, w_2 = _read_state(param, velocity, at_2, inside_2, True, BUFFER)
        total += tl.sum(g_2, axis=1)
    mean = total / length.to(tl.float32)
    _update(param, velocity, at, inside, g - mean[:, None], v, w, rates, ALIGNED, BUFFER, NESTEROV)
    if ALIGNED:
        _update(
            param, velocity, at_2, inside_2, g_2 - mean[:, None], v_2, w_2, rates,
            True, BUFFER, NESTEROV,
        )  # fmt: skip


@triton.jit
def _long_row(
    param, grad, velocity, row, length, rates, unscale,
    BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update one long row: its gradient is read twice, the second time from the cache."""
    param, grad, velocity = _moved(param, grad, velocity, row * length)
    length = length.to(tl.int32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for first in range(0, length, TILE):
        at = first + tl.arange(0, TILE)
        total += _read(grad, at, at < length, False)
    mean = tl.sum(total, axis=0) * unscale / tl.maximum(length, 1).to(tl.float32)
    for first in range(0, length, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < length
        g = _read(grad, at, inside, False) * unscale
        v, w = _read_state(param, velocity, at, inside, False, BUFFER)
        _update(param, velocity, at, inside, g - mean, v, w, rates, False, BUFFER, NESTEROV)


@triton.jit
def _columns(
    param, grad, velocity, tile, columns, length, rates, unscale,
    BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update a stripe of columns with a mean each: read twice, the second time from the cache."""
    HEIGHT: tl.constexpr = TILE // STRIPE
    # Tensors of this form are small enough for offsets of 32 bits.
    tile, columns, length = tile.to(tl.int32), columns.to(tl.int32), length.to(tl.int32)
    column = tile * STRIPE + tl.arange(0, STRIPE)
    total = tl.zeros((HEIGHT, STRIPE), dtype=tl.float32)
    for first in range(0, length, HEIGHT):
        at, inside = _block(first + tl.arange(0, HEIGHT), column, length, columns)
        total += _read(grad, at, inside, False)
    mean = tl.sum(total, axis=0) * unscale / length.to(tl.float32)
    for first in range(0, length, HEIGHT):
        at, inside = _block(first + tl.arange(0, HEIGHT), column, length, columns)
        g = _read(grad, at, inside, False) * unscale
        v, w = _read_state(param, velocity, at, inside, False, BUFFER)
        _update(
            param, velocity, at, inside, g - mean[None, :], v, w, rates, False, BUFFER, NESTEROV
        )  # fmt: skip


@triton.jit
def _flat(
    param, grad, velocity, sums, tile, count, inner, outputs, inputs, span, rates, unscale,
    BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update entries in the order of memory, with given sums or none."""
    first = tile * TILE
    param, grad, velocity = _moved(param, grad, velocity, first)
    at = tl.arange(0, TILE)
    inside = at < _left(count, first)
    g = _read(grad, at, inside, False) * unscale
    v, w = _read_state(param, velocity, at, inside, False, BUFFER)
    mean = tl.zeros((TILE,), dtype=tl.float32)
    if inputs > 0:  # tensors that are not centred have no sums
        entry = first.to(tl.int32) + at  # of a tensor that is small enough
        place = entry // span.to(tl.int32) * outputs.to(tl.int32)
        place += entry // inner.to(tl.int32) % outputs.to(tl.int32)
        mean = tl.load(sums + place, mask=inside, other=0.0) * unscale / inputs.to(tl.float32)
    _update(param, velocity, at, inside, g - mean, v, w, rates, False, BUFFER, NESTEROV)


@triton.jit(do_not_specialize=["lr", "momentum", "decay", "sign"])
def step(
    tiles, tensors, moving, lr, momentum, decay, sign, lr_at, scale_at, inf_at,
    DTYPE: tl.constexpr, BUFFER: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update one tile; ``fused.Plan`` has the tables. The last three pointers may be None."""
    which = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    tile = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64)
    about = tensors + which * FIELDS
    pointer = tl.pointer_type(DTYPE)
    param = tl.load(about).to(pointer)
    velocity = tl.load(about + 1).to(pointer)
    sums = tl.load(about + 2).to(tl.pointer_type(tl.float32))
    shape = tl.load(about + 3)
    length = tl.load(about + 4)
    count = tl.load(about + 5)
    inner = tl.load(about + 6)
    outputs = tl.load(about + 7)
    inputs = tl.load(about + 8)
    grad = tl.load(moving + which).to(pointer)
    if lr_at is not None:
        lr = tl.load(lr_at).to(tl.float32)
    unscale = 1.0
    if scale_at is not None:
        unscale = 1.0 / tl.load(scale_at)
    if inf_at is not None:
        # An infinite gradient anywhere: nothing is inside any tile.
        count = tl.where(tl.load(inf_at) == 0.0, count, 0)
    rates = lr, momentum, 1.0 - decay * lr, sign
    if shape == 0:
        _flat(param, grad, velocity, sums, tile, count, inner, outputs, inputs, length,
              rates, unscale, BUFFER, NESTEROV)  # fmt: skip
    elif shape == 1:
        _long_row(param, grad, velocity, tile, tl.where(count > 0, length, 0),
                  rates, unscale, BUFFER, NESTEROV)  # fmt: skip
    elif shape == 2:
        _columns(param, grad, velocity, tile, count, length, rates, unscale, BUFFER, NESTEROV)
    elif shape < 256:
        for power in tl.static_range(4, 7, 2):
            if shape == 1 << power:
                _rows(param, grad, velocity, tile, count, length, rates, unscale,
                      1 << power, False, BUFFER, NESTEROV)  # fmt: skip
    else:
        for power in tl.static_range(8, 13):
            if shape == 1 << power:
                _rows(param, grad, velocity, tile, count, length, rates, unscale,
                      1 << power, True, BUFFER, NESTEROV)  # fmt: skip


HANDED = 8  # addresses that one launch of write takes as arguments


@triton.jit(do_not_specialize=["a", "b", "c", "d", "e", "f", "g", "h"])
def write(table, a, b, c, d, e, f, g, h):
    """Write addresses into a table by value: a CUDA graph may not copy from the host."""
    tl.store(table, a)
    tl.store(table + 1, b)
    tl.store(table + 2, c)
    tl.store(table + 3, d)
    tl.store(table + 4, e)
    tl.store(table + 5, f)
    tl.store(table + 6, g)
    tl.store(table + 7, h)
