"""Triton kernels of GRUs and LSTMs whose weights differ between clients: one launch per time step.

A program computes some units of one client's batch: it multiplies the state before by the weights
of the gates, and applies the gates on chip. Going back, it first multiplies the gradients of the
next time step's gates by the weights, and then computes those of its own units. The gradient of
the weights is one large product after the last time step. In TF32 the weights are read as float16,
which has the same ten bits of mantissa (:func:`~precision.narrowed`).

States, cells and gates are ``[client, time, batch, units]``; a GRU's gates are reset, update, new
and the product for new, an LSTM's write, keep, new and show. :mod:`cuda_recurrence` does all time
steps at once, where that is faster.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedzmg.kernels.cuda_recurrence import recurrence_for
from fedzmg.kernels.precision import narrowed

MOST_ROWS = 32  # of a batch, computed by one program
UNITS, DEPTH, WARPS, STAGES = 32, 64, 4, 3  # DEPTH: columns of the weights read at a time


@triton.jit
def sigmoid(x):
    """Compute the logistic function."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent from a decaying exponential, which cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x >= 0, t, -t)


@triton.jit
def add_product(x, w, total, PRECISION: tl.constexpr):
    """Add ``x @ w``; for float16 weights, rows of ``x`` are scaled to their range."""
    if w.dtype == tl.float16:
        top = tl.max(tl.abs(x), 1)[:, None]
        top = tl.where(top > 0, top, 1.0)
        total += tl.dot((x / top).to(tl.float16), w) * top
    else:
        total = tl.dot(x.to(w.dtype), w, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["time"])
def _gru_step_kernel(
    from_input, weights, bias, states, gates, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units of a GRU's state after one time step, and its gates."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real, known = (rows < batch)[:, None] & (unit < U)[None, :], (unit < U)[None, :]
    here = ((client * steps + time) * batch + rows)[:, None] * U
    before = states + here - batch * U
    bias += client * 3 * U + unit[None, :]
    empty = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    reset = empty + tl.load(bias, mask=known)
    update = empty + tl.load(bias + U, mask=known)
    product = empty + tl.load(bias + 2 * U, mask=known)
    if time > 0:  # before the first time step states are zero
        weights += client * 3 * U * U
        for first in range(0, U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < U)[None, :]
            state = tl.load(before + depth[None, :], mask=there, other=0.0)
            inside = (depth < U)[:, None] & known
            tile = weights + unit[None, :] * U + depth[:, None]
            w = tl.load(tile, mask=inside, other=0.0)
            reset = add_product(state, w, reset, PRECISION)
            w = tl.load(tile + U * U, mask=inside, other=0.0)
            update = add_product(state, w, update, PRECISION)
            w = tl.load(tile + 2 * U * U, mask=inside, other=0.0)
            product = add_product(state, w, product, PRECISION)
    given = from_input + ((client * batch + rows) * steps + time)[:, None] * 3 * U + unit[None, :]
    reset = sigmoid(reset + tl.load(given, mask=real, other=0.0))
    update = sigmoid(update + tl.load(given + U, mask=real, other=0.0))
    new = tanh(tl.load(given + 2 * U, mask=real, other=0.0) + reset * product)
    old = tl.load(before + unit[None, :], mask=real & (time > 0), other=0.0)
    tl.store(states + here + unit[None, :], new + update * (old - new), mask=real)
    kept = gates + 4 * here + unit[None, :]
    tl.store(kept, reset, mask=real)
    tl.store(kept + U, update, mask=real)
    tl.store(kept + 2 * U, new, mask=real)
    tl.store(kept + 3 * U, product, mask=real)


@triton.jit
def _add_from_later(
    down, sums, weights, client, here, rows, unit, batch,
    WIDTH: tl.constexpr, U: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the gates of the next time step send back through the weights."""
    weights += client * WIDTH * U
    later = sums + (here + batch * U) * (WIDTH // U)
    for first in range(0, WIDTH, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        there = (rows < batch)[:, None] & (depth < WIDTH)[None, :]
        next_ = tl.load(later + depth[None, :], mask=there, other=0.0)
        inside = (depth < WIDTH)[:, None] & (unit < U)[None, :]
        w = tl.load(weights + depth[:, None] * U + unit[None, :], mask=inside, other=0.0)
        down = add_product(next_, w, down, PRECISION)
    return down


@triton.jit(do_not_specialize=["time"])
def _gru_back_kernel(
    signal, carried, states, gates, weights, to_input, sums, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units' gradients at one time; ``carried`` keeps what skips the weights."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    here = ((client * steps + time) * batch + rows)[:, None] * U
    place = carried + (client * batch + rows)[:, None] * U + unit[None, :]
    down = tl.load(signal + here + unit[None, :], mask=real, other=0.0)
    if time < steps - 1:
        down += tl.load(place, mask=real, other=0.0)
        down = _add_from_later(
            down, sums, weights, client, here, rows, unit, batch, 3 * U, U, DEPTH, PRECISION
        )
    kept = gates + 4 * here + unit[None, :]
    reset = tl.load(kept, mask=real, other=0.0)
    update = tl.load(kept + U, mask=real, other=0.0)
    new = tl.load(kept + 2 * U, mask=real, other=0.0)
    product = tl.load(kept + 3 * U, mask=real, other=0.0)
    before = states + here - batch * U + unit[None, :]
    old = tl.load(before, mask=real & (time > 0), other=0.0)
    of_new = down * (1.0 - update) * (1.0 - new * new)
    of_update = down * (old - new) * update * (1.0 - update)
    of_reset = of_new * product * reset * (1.0 - reset)
    target = to_input + 3 * here + unit[None, :]
    tl.store(target, of_reset, mask=real)
    tl.store(target + U, of_update, mask=real)
    tl.store(target + 2 * U, of_new, mask=real)
    found = sums + 3 * here + unit[None, :]
    tl.store(found, of_reset, mask=real)
    tl.store(found + U, of_update, mask=real)
    tl.store(found + 2 * U, of_new * reset, mask=real)
    tl.store(place, down * update, mask=real)


@triton.jit(do_not_specialize=["time"])
def _lstm_step_kernel(
    from_input, weights, bias, states, cells, gates, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units of an LSTM's state and cell after one time step, and their gates."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    # from_input: [client, batch, steps, 4 U]
    given = from_input + ((client * batch + rows) * steps + time)[:, None] * 4 * U + unit[None, :]
    bias += client * 4 * U + unit[None, :]
    known = (unit < U)[None, :]
    write = tl.load(given, mask=real, other=0.0) + tl.load(bias, mask=known)
    keep = tl.load(given + U, mask=real, other=0.0) + tl.load(bias + U, mask=known)
    new = tl.load(given + 2 * U, mask=real, other=0.0) + tl.load(bias + 2 * U, mask=known)
    show = tl.load(given + 3 * U, mask=real, other=0.0) + tl.load(bias + 3 * U, mask=known)
    # states, cells: [client, steps, batch, U]; before the first time step they are zero.
    here = ((client * steps + time) * batch + rows)[:, None] * U
    before = here - batch * U
    if time > 0:
        weights += client * 4 * U * U
        for first in range(0, U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < U)[None, :]
            state = tl.load(states + before + depth[None, :], mask=there, other=0.0)
            inside = (depth < U)[:, None] & known
            tile = weights + unit[None, :] * U + depth[:, None]
            w = tl.load(tile, mask=inside, other=0.0)
            write = add_product(state, w, write, PRECISION)
            w = tl.load(tile + U * U, mask=inside, other=0.0)
            keep = add_product(state, w, keep, PRECISION)
            w = tl.load(tile + 2 * U * U, mask=inside, other=0.0)
            new = add_product(state, w, new, PRECISION)
            w = tl.load(tile + 3 * U * U, mask=inside, other=0.0)
            show = add_product(state, w, show, PRECISION)
    write, keep, new, show = sigmoid(write), sigmoid(keep), tanh(new), sigmoid(show)
    old = tl.load(cells + before + unit[None, :], mask=real & (time > 0), other=0.0)
    cell = keep * old + write * new
    tl.store(cells + here + unit[None, :], cell, mask=real)
    tl.store(states + here + unit[None, :], show * tanh(cell), mask=real)
    kept = gates + 4 * here + unit[None, :]
    tl.store(kept, write, mask=real)
    tl.store(kept + U, keep, mask=real)
    tl.store(kept + 2 * U, new, mask=real)
    tl.store(kept + 3 * U, show, mask=real)


@triton.jit(do_not_specialize=["time"])
def _lstm_back_kernel(
    signal, carried, cells, gates, weights, sums, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the gates' sums at one time; ``carried`` is that of the cell."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    here = ((client * steps + time) * batch + rows)[:, None] * U
    down = tl.load(signal + here + unit[None, :], mask=real, other=0.0)
    if time < steps - 1:
        down = _add_from_later(
            down, sums, weights, client, here, rows, unit, batch, 4 * U, U, DEPTH, PRECISION
        )
    kept = gates + 4 * here + unit[None, :]
    write = tl.load(kept, mask=real, other=0.0)
    keep = tl.load(kept + U, mask=real, other=0.0)
    new = tl.load(kept + 2 * U, mask=real, other=0.0)
    show = tl.load(kept + 3 * U, mask=real, other=0.0)
    bent = tanh(tl.load(cells + here + unit[None, :], mask=real, other=0.0))
    before = cells + here - batch * U + unit[None, :]
    old = tl.load(before, mask=real & (time > 0), other=0.0)
    place = carried + (client * batch + rows)[:, None] * U + unit[None, :]
    of_cell = tl.load(place, mask=real, other=0.0) + down * show * (1.0 - bent * bent)
    tl.store(place, of_cell * keep, mask=real)
    found = sums + 4 * here + unit[None, :]
    tl.store(found, of_cell * new * write * (1.0 - write), mask=real)
    tl.store(found + U, of_cell * old * keep * (1.0 - keep), mask=real)
    tl.store(found + 2 * U, of_cell * write * (1.0 - new * new), mask=real)
    tl.store(found + 3 * U, down * bent * show * (1.0 - show), mask=real)


def forward(
    from_input: Tensor, weights: Tensor, bias: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states, cells (of a GRU empty) and gates."""
    clients, batch, steps, width = from_input.shape
    units, weights = weights.shape[-1], narrowed(weights, precision)
    is_lstm, shape = width == 4 * units, (clients, steps, batch)
    states = from_input.new_empty(*shape, units)
    cells, gates = (from_input.new_empty(*shape, n * units) for n in (int(is_lstm), 4))
    if (kernels := recurrence_for(weights, batch)) is not None:
        kernels.forward(from_input, weights, bias, states, cells, gates)
        return states, cells, gates
    given = from_input, weights, bias, states, *[cells] * is_lstm, gates
    for time in range(steps):
        _launch(_lstm_step_kernel if is_lstm else _gru_step_kernel, given, time, states, precision)
    return states, cells, gates


def backward(
    signal: Tensor, of_cell: Tensor, states: Tensor, cells: Tensor, gates: Tensor, weights: Tensor,
    precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of a GRU's input, and of the products with the weights."""
    (_, width, units), weights = weights.shape, narrowed(weights, precision)
    is_lstm, shape = width == 4 * units, states.shape[:3]
    to_input = signal.new_empty(*shape, 0 if is_lstm else width)
    sums = signal.new_empty(*shape, width)
    if (kernels := recurrence_for(weights, shape[2])) is not None:
        kernels.backward(signal, of_cell, states, cells, gates, weights, to_input, sums)
        return to_input, sums
    kernel, given = _gru_back_kernel, [states, gates, weights, to_input, sums]
    carried = torch.empty_like(signal[:, 0])
    if is_lstm:
        kernel, given, carried = _lstm_back_kernel, [cells, gates, weights, sums], of_cell.clone()
    for time in reversed(range(shape[1])):
        _launch(kernel, [signal, carried, *given], time, states, precision)
    return to_input, sums


def _launch(
    kernel: Any, given: Sequence[Tensor], time: int, states: Tensor, precision: str
) -> None:
    clients, steps, batch, units = states.shape
    rows = min(max(16, triton.next_power_of_2(batch)), MOST_ROWS)
    kernel[triton.cdiv(units, UNITS), clients, triton.cdiv(batch, rows)](
        *given, time, steps, batch, U=units, ROWS=rows, BLOCK=UNITS, DEPTH=DEPTH,
        PRECISION=precision, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
