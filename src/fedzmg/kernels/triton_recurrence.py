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

from fedzmg.kernels.cuda_recurrence import BACKWARD, FORWARD, recurrence_for
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
def _step_kernel(
    from_input, weights, bias, states, cells, gates, time, steps, batch,
    GATES: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units of state and cell after one time step, and their gates."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real, known = (rows < batch)[:, None] & (unit < U)[None, :], (unit < U)[None, :]
    here = ((client * steps + time) * batch + rows)[:, None] * U
    before = here - batch * U
    bias += client * GATES * U + unit[None, :]
    empty = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    one = empty + tl.load(bias, mask=known)
    two = empty + tl.load(bias + U, mask=known)
    three = empty + tl.load(bias + 2 * U, mask=known)
    four = empty
    if GATES == 4:
        four += tl.load(bias + 3 * U, mask=known)
    if time > 0:  # before the first time step states are zero
        weights += client * GATES * U * U
        for first in range(0, U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < U)[None, :]
            state = tl.load(states + before + depth[None, :], mask=there, other=0.0)
            inside = (depth < U)[:, None] & known
            tile = weights + unit[None, :] * U + depth[:, None]
            w = tl.load(tile, mask=inside, other=0.0)
            one = add_product(state, w, one, PRECISION)
            w = tl.load(tile + U * U, mask=inside, other=0.0)
            two = add_product(state, w, two, PRECISION)
            w = tl.load(tile + 2 * U * U, mask=inside, other=0.0)
            three = add_product(state, w, three, PRECISION)
            if GATES == 4:
                w = tl.load(tile + 3 * U * U, mask=inside, other=0.0)
                four = add_product(state, w, four, PRECISION)
    # from_input: [client, batch, time, gates, units]
    row = ((client * batch + rows) * steps + time)[:, None]
    given = from_input + row * GATES * U + unit[None, :]
    one = sigmoid(one + tl.load(given, mask=real, other=0.0))
    two = sigmoid(two + tl.load(given + U, mask=real, other=0.0))
    new_input = tl.load(given + 2 * U, mask=real, other=0.0)
    if GATES == 3:
        old = tl.load(states + before + unit[None, :], mask=real & (time > 0), other=0.0)
        new, four = tanh(new_input + one * three), three
        after = new + two * (old - new)
    else:
        old = tl.load(cells + before + unit[None, :], mask=real & (time > 0), other=0.0)
        new = tanh(new_input + three)
        four = sigmoid(four + tl.load(given + 3 * U, mask=real, other=0.0))
        cell = two * old + one * new
        tl.store(cells + here + unit[None, :], cell, mask=real)
        after = four * tanh(cell)
    tl.store(states + here + unit[None, :], after, mask=real)
    kept = gates + 4 * here + unit[None, :]
    tl.store(kept, one, mask=real)
    tl.store(kept + U, two, mask=real)
    tl.store(kept + 2 * U, new, mask=real)
    tl.store(kept + 3 * U, four, mask=real)


@triton.jit(do_not_specialize=["time"])
def _back_kernel(
    signal, carried, states, cells, gates, weights, to_input, sums, time, steps, batch,
    GATES: tl.constexpr, U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units' gradients at one time; ``carried`` keeps what skips the weights."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    here = ((client * steps + time) * batch + rows)[:, None] * U
    down = tl.load(signal + here + unit[None, :], mask=real, other=0.0)
    if time < steps - 1:
        weights += client * GATES * U * U
        later = sums + GATES * (here + batch * U)
        for first in range(0, GATES * U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < GATES * U)[None, :]
            next_ = tl.load(later + depth[None, :], mask=there, other=0.0)
            inside = (depth < GATES * U)[:, None] & (unit < U)[None, :]
            w = tl.load(weights + depth[:, None] * U + unit[None, :], mask=inside, other=0.0)
            down = add_product(next_, w, down, PRECISION)
    kept = gates + 4 * here + unit[None, :]
    one = tl.load(kept, mask=real, other=0.0)
    two = tl.load(kept + U, mask=real, other=0.0)
    new = tl.load(kept + 2 * U, mask=real, other=0.0)
    last = tl.load(kept + 3 * U, mask=real, other=0.0)
    place = carried + (client * batch + rows)[:, None] * U + unit[None, :]
    skipped = tl.load(place, mask=real, other=0.0)
    before, has_past = here - batch * U + unit[None, :], real & (time > 0)
    found = sums + GATES * here + unit[None, :]
    if GATES == 3:  # reset, update, new, product for new
        down += skipped
        old = tl.load(states + before, mask=has_past, other=0.0)
        of_new = down * (1.0 - two) * (1.0 - new * new)
        of_one = of_new * last * one * (1.0 - one)
        of_two = down * (old - new) * two * (1.0 - two)
        target = to_input + 3 * here + unit[None, :]
        tl.store(target, of_one, mask=real)
        tl.store(target + U, of_two, mask=real)
        tl.store(target + 2 * U, of_new, mask=real)
        tl.store(found + 2 * U, of_new * one, mask=real)
        tl.store(place, down * two, mask=real)
    else:  # write, keep, new, show
        old = tl.load(cells + before, mask=has_past, other=0.0)
        bent = tanh(tl.load(cells + here + unit[None, :], mask=real, other=0.0))
        of_cell = skipped + down * last * (1.0 - bent * bent)
        of_one = of_cell * new * one * (1.0 - one)
        of_two = of_cell * old * two * (1.0 - two)
        tl.store(found + 2 * U, of_cell * one * (1.0 - new * new), mask=real)
        tl.store(found + 3 * U, down * bent * last * (1.0 - last), mask=real)
        tl.store(place, of_cell * two, mask=real)
    tl.store(found, of_one, mask=real)
    tl.store(found + U, of_two, mask=real)


def forward(
    from_input: Tensor, weights: Tensor, bias: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute states, cells (of a GRU empty) and gates."""
    clients, batch, steps, width = from_input.shape
    units, weights = weights.shape[-1], narrowed(weights, precision)
    is_lstm, shape = width == 4 * units, (clients, steps, batch)
    states = from_input.new_empty(*shape, units)
    cells, gates = (from_input.new_empty(*shape, n * units) for n in (int(is_lstm), 4))
    given = from_input, weights, bias, states, cells, gates
    if (kernels := recurrence_for(weights, batch)) is not None:
        kernels.launch(FORWARD, given, (clients, steps, batch))
        return states, cells, gates
    for time in range(steps):
        _launch(_step_kernel, given, time, states, width, precision)
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
        given = signal, of_cell, states, cells, gates, weights, to_input, sums
        kernels.launch(BACKWARD, given, shape)
        return to_input, sums
    carried = of_cell.clone() if is_lstm else torch.zeros_like(signal[:, 0])
    given = signal, carried, states, cells, gates, weights, to_input, sums
    for time in reversed(range(shape[1])):
        _launch(_back_kernel, given, time, states, width, precision)
    return to_input, sums


def _launch(
    kernel: Any, given: Sequence[Tensor], time: int, states: Tensor, width: int, precision: str
) -> None:
    clients, steps, batch, units = states.shape
    rows = min(max(16, triton.next_power_of_2(batch)), MOST_ROWS)
    kernel[triton.cdiv(units, UNITS), clients, triton.cdiv(batch, rows)](
        *given, time, steps, batch, GATES=width // units, U=units, ROWS=rows, BLOCK=UNITS,
        DEPTH=DEPTH, PRECISION=precision, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
