"""Triton kernels of GRUs whose weights differ between clients, and of random bits.

A time step multiplies a thin matrix (batch by units) by a wide one (units by three gates) that no
cache holds for all clients at once, so its cost is reading the weights. One kernel per time step
reads them once and applies the gates on chip. Going back, the gradient of the weights is one large
product after the last time step, not a sum carried through all of them. In TF32 the weights are
read as float16, which has the same ten bits of mantissa (:func:`~precision.narrowed`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedzmg.kernels.layers import MULTIPLIERS, of_call
from fedzmg.kernels.precision import crowd, narrowed
from fedzmg.kernels.recurrence import recurrence_for

FIRST, SECOND, THIRD = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


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
    from_input, weights, bias, states, gates, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units after one time step, and the gates that the backward pass needs."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    weights += client * 3 * U * U
    # states: [client, steps + 1, batch, U]; the row of this time holds the state before it.
    before = states + ((client * (steps + 1) + time) * batch + rows)[:, None] * U
    reset = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    update = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    new_hidden = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(0, U, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        there = (rows < batch)[:, None] & (depth < U)[None, :]
        hidden = tl.load(before + depth[None, :], mask=there, other=0.0)
        inside = (depth < U)[:, None] & (unit < U)[None, :]
        tile = weights + unit[None, :] * U + depth[:, None]
        w = tl.load(tile, mask=inside, other=0.0)
        reset = add_product(hidden, w, reset, PRECISION)
        w = tl.load(tile + U * U, mask=inside, other=0.0)
        update = add_product(hidden, w, update, PRECISION)
        w = tl.load(tile + 2 * U * U, mask=inside, other=0.0)
        new_hidden = add_product(hidden, w, new_hidden, PRECISION)
    here = from_input + ((client * batch + rows) * steps + time)[:, None] * (3 * U) + unit[None, :]
    bias += client * 3 * U
    known = unit < U
    reset += tl.load(here, mask=real, other=0.0) + tl.load(bias + unit, mask=known)[None, :]
    update += (
        tl.load(here + U, mask=real, other=0.0) + tl.load(bias + U + unit, mask=known)[None, :]
    )
    new_hidden += tl.load(bias + 2 * U + unit, mask=known)[None, :]
    reset, update = sigmoid(reset), sigmoid(update)
    new = tanh(tl.load(here + 2 * U, mask=real, other=0.0) + reset * new_hidden)
    old = tl.load(before + unit[None, :], mask=real, other=0.0)
    tl.store(before + batch * U + unit[None, :], new + update * (old - new), mask=real)
    # gates: [client, steps, batch, 4, U]
    kept = gates + (((client * steps + time) * batch + rows) * 4)[:, None] * U + unit[None, :]
    tl.store(kept, reset, mask=real)
    tl.store(kept + U, update, mask=real)
    tl.store(kept + 2 * U, new, mask=real)
    tl.store(kept + 3 * U, new_hidden, mask=real)


@triton.jit(do_not_specialize=["time"])
def _back_kernel(
    signal, carried, states, gates, weights, to_input, to_hidden, time, steps, batch,
    U: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some units' gradients at one time; ``carried`` keeps what skips the weights."""
    client = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    real = (rows < batch)[:, None] & (unit < U)[None, :]
    place = (client * batch + rows)[:, None] * U + unit[None, :]
    given = ((client * batch + rows) * steps + time)[:, None]  # signal: [client, batch, steps, U]
    down = tl.load(signal + given * U + unit[None, :], mask=real, other=0.0)
    at = (client * steps + time) * batch + rows
    if time < steps - 1:
        weights += client * 3 * U * U
        source = to_hidden + (at + batch)[:, None] * (3 * U)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, 3 * U, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            there = (rows < batch)[:, None] & (depth < 3 * U)[None, :]
            back = tl.load(source + depth[None, :], mask=there, other=0.0)
            inside = (depth < 3 * U)[:, None] & (unit < U)[None, :]
            w = tl.load(weights + depth[:, None] * U + unit[None, :], mask=inside, other=0.0)
            total = add_product(back, w, total, PRECISION)
        down += total + tl.load(carried + place, mask=real, other=0.0)
    kept = gates + (at * 4)[:, None] * U + unit[None, :]
    reset = tl.load(kept, mask=real, other=0.0)
    update = tl.load(kept + U, mask=real, other=0.0)
    new = tl.load(kept + 2 * U, mask=real, other=0.0)
    new_hidden = tl.load(kept + 3 * U, mask=real, other=0.0)
    before = ((client * (steps + 1) + time) * batch + rows)[:, None] * U + unit[None, :]
    old = tl.load(states + before, mask=real, other=0.0)
    d_new = down * (1.0 - update) * (1.0 - new * new)
    d_update = down * (old - new) * update * (1.0 - update)
    d_reset = d_new * new_hidden * reset * (1.0 - reset)
    target = to_input + given * (3 * U) + unit[None, :]
    tl.store(target, d_reset, mask=real)
    tl.store(target + U, d_update, mask=real)
    tl.store(target + 2 * U, d_new, mask=real)
    hidden = to_hidden + at[:, None] * (3 * U) + unit[None, :]
    tl.store(hidden, d_reset, mask=real)
    tl.store(hidden + U, d_update, mask=real)
    tl.store(hidden + 2 * U, d_new * reset, mask=real)
    tl.store(carried + place, down * update, mask=real)


def _tile(weights: Tensor, batch: int, *, back: bool) -> dict[str, int]:
    """Size a program, and how it reads weights; for 16 bits, the fastest on an H200."""
    many, rows = crowd(len(weights)) > crowd(1), max(16, triton.next_power_of_2(batch))
    units, depth, stages = 64 if many or back else 32, 128, 2 if many else 3 + back
    if weights.element_size() == 4 or rows > 32:  # larger tiles may not fit
        units, depth, stages = 32, 64, 3
    return {"ROWS": rows, "BLOCK": units, "DEPTH": depth, "num_warps": 4, "num_stages": stages}


def forward(
    from_input: Tensor, weights: Tensor, bias: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Compute states ``[clients, steps + 1, batch, U]`` (the first zero) and gates."""
    clients, batch, steps, width = from_input.shape
    units, weights = width // 3, narrowed(weights, precision)
    states = from_input.new_zeros(clients, steps + 1, batch, units)
    gates = from_input.new_empty(clients, steps, batch, 4, units)
    if (kernels := recurrence_for(weights, batch)) is not None:
        kernels.forward(from_input, weights, bias, states, gates)
        return states, gates
    tile = _tile(weights, batch, back=False)
    grid = (triton.cdiv(units, tile["BLOCK"]), clients)
    for time in range(steps):
        _step_kernel[grid](
            from_input, weights, bias, states, gates, time, steps, batch,
            U=units, PRECISION=precision, **tile,
        )  # fmt: skip
    return states, gates


def backward(
    signal: Tensor, states: Tensor, gates: Tensor, weights: Tensor, precision: str
) -> tuple[Tensor, Tensor]:
    """Compute gradients of ``from_input`` and of the products ``[clients, steps, batch, 3 U]``."""
    clients, batch, steps, units = signal.shape
    weights = narrowed(weights, precision)
    to_input = signal.new_empty(clients, batch, steps, 3 * units)
    to_hidden = signal.new_empty(clients, steps, batch, 3 * units)
    if (kernels := recurrence_for(weights, batch)) is not None:
        kernels.backward(signal, gates, weights, to_hidden, states=states, to_input=to_input)
        return to_input, to_hidden
    carried = signal.new_empty(clients, batch, units)
    tile = _tile(weights, batch, back=True)
    grid = (triton.cdiv(units, tile["BLOCK"]), clients)
    for time in reversed(range(steps)):
        _back_kernel[grid](
            signal, carried, states, gates, weights, to_input, to_hidden, time, steps, batch,
            U=units, PRECISION=precision, **tile,
        )  # fmt: skip
    return to_input, to_hidden


@triton.jit
def _hash(bits):
    """Apply ``hash32`` to 32-bit words, whose products overflow as wanted."""
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = (bits ^ (bits >> 16)) * SECOND
    bits = (bits ^ (bits >> 16)) * THIRD
    return bits ^ (bits >> 15)


@triton.jit(do_not_specialize=["salt", "factor", "below", "kept"])
def _draws_kernel(
    keys, out, salt, factor, below, kept, places, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Draw bits (``FORM`` 0), flags of those ``below`` (1), or zero for these and ``kept`` (2)."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + client)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    first = _hash(_hash(low) ^ high)
    bits = _hash(place.to(tl.uint32) * (_hash(first ^ low) >> 1 | 1) + first)
    # Half the range is taken off the salt and off both sides of the comparison: signed words.
    bits = (bits ^ salt.to(tl.uint32) ^ 0x80000000) * factor.to(tl.uint32)
    here = out + client * places + place
    drawn = (bits ^ 0x80000000).to(tl.int32, bitcast=True)
    if FORM == 0:
        tl.store(here, bits.to(tl.int64), mask=place < places)
    elif FORM == 1:
        tl.store(here, drawn < below, mask=place < places)
    else:
        tl.store(here, tl.where(drawn < below, 0.0, kept), mask=place < places)


def draws(
    keys: Tensor, layer: int, call: int, places: int, below: int | None = None,
    kind: torch.dtype | None = None, kept: float = 0.0,
) -> Tensor:  # fmt: skip
    """Draw bits ``[clients, places]``, flags of those ``below``, or zero for these and ``kept``."""
    form = 0 if below is None else 1 if kind is None else 2
    own = (torch.int64, torch.bool, kind)[form]
    out = torch.empty((len(keys), places), dtype=own, device=keys.device)
    grid, (salt, factor) = (triton.cdiv(places, 1024), len(keys)), of_call(layer, call)
    least = (below or 0) - (1 << 31)
    _draws_kernel[grid](
        keys.contiguous(), out, salt - (1 << 31), factor, least, kept, places, FORM=form, BLOCK=1024
    )
    return out
