"""Triton kernels of LSTMs whose weights differ between clients: one per time step, in and back.

A program computes some units of one client's batch: it multiplies the state before by the weights
of the four gates, and applies the gates on chip. Going back, it first multiplies the gradients of
the next time step's gates by the weights, and then computes those of its own units. The gradient of
the weights is one large product after the last time step.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedzmg.kernels.precision import narrowed
from fedzmg.kernels.recurrence import recurrence_for
from fedzmg.kernels.triton_layers import add_product, sigmoid, tanh

MOST_ROWS = 32  # of a batch, computed by one program
UNITS, DEPTH, WARPS, STAGES = 32, 64, 4, 3  # DEPTH: columns of the weights read at a time


@triton.jit(do_not_specialize=["time"])
def _step_kernel(
    from_input, weights, bias, states, cells, gates, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units of state and cell after one time step, and their gates."""
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
def _back_kernel(
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
        weights += client * 4 * U * U
        later = sums + 4 * (here + batch * U)
        for first in range(0, 4 * U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < 4 * U)[None, :]
            next_ = tl.load(later + depth[None, :], mask=there, other=0.0)
            inside = (depth < 4 * U)[:, None] & (unit < U)[None, :]
            w = tl.load(weights + depth[:, None] * U + unit[None, :], mask=inside, other=0.0)
            down = add_product(next_, w, down, PRECISION)
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
    """Compute states and cells ``[clients, steps, batch, U]``, and gates."""
    clients, batch, steps, width = from_input.shape
    states, cells = (from_input.new_empty(clients, steps, batch, width // 4) for _ in range(2))
    gates = from_input.new_empty(clients, steps, batch, width)
    weights = narrowed(weights, precision)
    if (kernels := recurrence_for(weights, batch)) is not None:
        kernels.forward(from_input, weights, bias, states, gates, cells)
        return states, cells, gates
    given = from_input, weights, bias, states, cells, gates
    for time in range(steps):
        _launch(_step_kernel, given, time, states, precision)
    return states, cells, gates


def backward(
    signal: Tensor, of_cell: Tensor, cells: Tensor, gates: Tensor, weights: Tensor, precision: str
) -> Tensor:
    """Compute the gradients of the gates' sums ``[clients, steps, batch, 4 U]``."""
    sums, weights = torch.empty_like(gates), narrowed(weights, precision)
    if (kernels := recurrence_for(weights, signal.shape[2])) is not None:
        kernels.backward(signal, gates, weights, sums, cells=cells, of_cell=of_cell)
        return sums
    given = signal, of_cell.clone(), cells, gates, weights, sums
    for time in reversed(range(signal.shape[1])):
        _launch(_back_kernel, given, time, signal, precision)
    return sums


def _launch(
    kernel: Any, given: tuple[Tensor, ...], time: int, states: Tensor, precision: str
) -> None:
    clients, steps, batch, units = states.shape
    rows = min(max(16, triton.next_power_of_2(batch)), MOST_ROWS)
    kernel[triton.cdiv(units, UNITS), clients, triton.cdiv(batch, rows)](
        *given, time, steps, batch, U=units, ROWS=rows, BLOCK=UNITS, DEPTH=DEPTH,
        PRECISION=precision, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
