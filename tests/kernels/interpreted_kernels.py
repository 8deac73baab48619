"""Our GPU kernels under Triton's interpreter, against autograd; prints the largest differences.

``test_kernels.py`` runs it in a process of its own: the interpreter is switched on for a whole
process, before Triton is imported.
"""

from __future__ import annotations

import json
import sys

import recurrence_reference
import torch
import torch.nn.functional as F
from torch import Tensor

from fedzmg.kernels import (
    patches,
    triton_convolution,
    triton_draws,
    triton_norm,
    triton_patches,
    triton_recurrence,
)
from fedzmg.kernels.layers import RANGE, random_bits

CONVOLUTIONS = {
    # clients, batch, channels, filters, height, width, taps, padding
    "few channels": (2, 2, 3, 17, 6, 5, 3, 1),
    "one channel, several shares": (1, 1, 1, 6, 23, 24, 3, 1),
    "channels in no multiple of a tile": (1, 1, 20, 8, 5, 5, 3, 0),
    "more padding than needed": (1, 2, 2, 3, 4, 4, 3, 3),
    "more padding, rows of taps": (2, 1, 16, 3, 4, 3, 3, 3),
    "one client, one pixel": (1, 1, 2, 2, 1, 1, 1, 0),
    "one tap": (1, 2, 16, 16, 3, 3, 1, 0),
    "rows of taps in unequal groups": (1, 1, 16, 20, 5, 6, 5, 2),
    "blocks of channels and filters": (1, 1, 64, 70, 4, 3, 2, 0),
    "rows of taps, several shares": (1, 1, 16, 8, 24, 24, 2, 1),
}
DRAWS = {
    # layer, call, places, share of them that is under the bound
    "a quarter": (0, 0, 1500, 0.25),
    "nearly all, second call": (7, 1, 100, 0.999),
    "bits": (1, 2, 1025, None),
}
SMALL = 1e-9  # gradients below the range of float16, in which TF32's weights are read
RECURRENCES = {
    # clients, batch, steps, units
    "more units than a tile": (1, 3, 2, 70),
    "more rows than a tile": (2, 17, 3, 6),
    "one step": (1, 1, 1, 1),
}
NORMS = {
    # clients, batch, channels, height, width; axes in the order of memory
    "images": ((2, 5, 3, 4, 6), (0, 1, 2, 3, 4)),
    "images, batch last": ((2, 9, 3, 8, 6), (0, 2, 3, 4, 1)),
    "images, channels last": ((2, 4, 20, 3, 3), (0, 1, 3, 4, 2)),
    "vectors": ((2, 6, 18, 1, 1), (0, 1, 2, 3, 4)),
}
PATCHES = {
    # clients, channels, height, width, batch; taps, stride, padding
    "padded": ((2, 4, 7, 6, 3), (3, 3), (1, 1), (1, 1)),
    "unequal": ((2, 4, 7, 6, 3), (3, 2), (2, 1), (1, 0)),
    "one tap": ((1, 3, 5, 5, 2), (1, 1), (2, 2), (0, 0)),
    "wide strides": ((1, 3, 9, 9, 2), (3, 3), (3, 2), (2, 2)),
}


def last(x: Tensor) -> Tensor:
    return x.permute(0, 1, 3, 4, 2).contiguous()


def difference(*pairs: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def convolution(
    case: tuple[int, ...], precision: str = "tf32", dtype: torch.dtype = torch.float32
) -> float:
    """The interpreter multiplies in float32 whatever the precision: it only chooses the tiles."""
    clients, batch, channels, filters, height, width, taps, pad = case
    x = torch.randn(clients, batch, channels, height, width).to(dtype)
    w = torch.randn(clients, filters, channels, taps, taps).to(dtype)
    exact, slow = x.float().requires_grad_(), w.float().requires_grad_()
    expected = torch.stack([F.conv2d(a, b, padding=pad) for a, b in zip(exact, slow, strict=True)])
    signal = torch.randn_like(expected).to(dtype)
    for_x, for_w = torch.autograd.grad(expected, [exact, slow], signal.float())
    kernels = triton_convolution
    with torch.no_grad():
        out = kernels.convolve(last(x), w, (pad, pad), precision)
        back = kernels.convolve(last(signal), w, (pad, pad), precision, turned=True)
        slope = kernels.weight_gradient(last(x), last(signal), (taps, taps), (pad, pad), precision)
        worst = difference((slope, for_w))
        for got, want in ((out, expected), (back, for_x)):
            # Outputs may lose half a unit of their last place; more is ours.
            own = (got.float() - want).abs() - want.abs() * torch.finfo(dtype).eps / 2
            worst = max(worst, difference((want + own.relu(), want)))
        return worst


def recurrence(clients: int, batch: int, steps: int, units: int, precision: str = "ieee") -> float:
    from_input = torch.randn(clients, batch, steps, 3 * units, requires_grad=True)
    w = (torch.randn(clients, 3 * units, units) / 5).requires_grad_()
    b = torch.randn(clients, 3 * units, requires_grad=True)
    hidden, states = torch.zeros(clients, batch, units), []
    for t in range(steps):
        reset, update, new = from_input[:, :, t].chunk(3, -1)
        own = torch.baddbmm(b[:, None], hidden, w.mT).chunk(3, -1)
        reset, update = torch.sigmoid(reset + own[0]), torch.sigmoid(update + own[1])
        hidden = (1 - update) * torch.tanh(new + reset * own[2]) + update * hidden
        states.append(hidden)
    expected = torch.stack(states, 2)
    scale = SMALL if precision == "tf32" else 1.0
    signal = torch.randn_like(expected) * scale
    slopes = torch.autograd.grad(expected, [from_input, w, b], signal)
    with torch.no_grad():
        got, cells, gates = triton_recurrence.forward(from_input, w, b, precision)
        back = signal.transpose(1, 2).contiguous(), cells[:, -1], got, cells, gates, w, precision
        to_input, to_hidden = triton_recurrence.backward(*back)
        for_w = torch.einsum("ktbj,ktbu->kju", to_hidden[:, 1:], got[:, :-1])
        return difference(
            (got.transpose(1, 2), expected),
            (to_input.transpose(1, 2) / scale, slopes[0] / scale),
            (for_w / scale, slopes[1] / scale),
            (to_hidden.sum((1, 2)) / scale, slopes[2] / scale),
        )


def long_memory(clients: int, batch: int, steps: int, units: int, precision: str = "ieee") -> float:
    given = [
        torch.randn(clients, batch, steps, 4 * units),
        torch.randn(clients, 4 * units, units) / 5,
    ]
    given.append(torch.randn(clients, 4 * units))
    expected = recurrence_reference.forward(*given)
    got = triton_recurrence.forward(*given, precision)
    scale = SMALL if precision == "tf32" else 1.0
    signal, of_cell = torch.randn_like(expected[0]), torch.randn(clients, batch, units)
    back = signal * scale, of_cell * scale, *expected, given[1]
    found = triton_recurrence.backward(*back, precision)[1] / scale
    wanted = recurrence_reference.backward(*back)[1] / scale
    return difference(*zip(got, expected, strict=True), (found, wanted))


def normalisation(shape: tuple[int, ...], order: tuple[int, ...]) -> float:
    """Two clients, of which the second has padded batches and the first may have none."""
    clients, batch, channels = shape[:3]
    x = torch.empty_permuted(shape, order).copy_(torch.randn(shape)).double().requires_grad_()
    real = torch.arange(batch) < torch.tensor([[batch], [batch - 1]])
    own = [torch.rand(clients, channels).double() + 0.5 for _ in range(4)]
    weight, bias = own[0].requires_grad_(), own[1].requires_grad_()
    expected, moved = [], []
    for i in range(clients):
        statistics = [part[i].detach().clone() for part in own[2:]]
        some = x[i][real[i]]
        expected.append(F.batch_norm(some, *statistics, weight[i], bias[i], training=True))
        moved.append(torch.stack(statistics))
    signals = [torch.randn_like(part) for part in expected]
    slopes = torch.autograd.grad(expected, [x, weight, bias], signals)
    signal = torch.zeros(*shape[:-1], shape[-1] + 1)[..., :-1]  # of another layout
    for i in range(clients):
        signal[i][real[i]] = signals[i].float()
    with torch.no_grad():
        single, flags = x.float(), real.view(torch.uint8)
        out, *known, mean, var = triton_norm.forward(
            single, flags, [part.float() for part in own], 0.1, 1e-5
        )
        found = triton_norm.backward(single, signal, flags, weight.float(), *known)
        pairs = [(out[i][real[i]], expected[i]) for i in range(clients)]
        stacked = torch.stack(moved, 1)
        statistics = (mean, stacked[0]), (var, stacked[1])
        return difference(*pairs, *zip(found, slopes, strict=True), *statistics)


def half_weights() -> float:
    """Weights of 16 bits do not round the statistics; ones are the same in both types."""
    x, signal = torch.randn(2, 2, 5, 3, 4, 4) + 30
    real, statistics = torch.ones(2, 5, dtype=torch.uint8), list(torch.rand(2, 2, 3))
    found = []
    for kind in (torch.float32, torch.bfloat16):
        own = [torch.ones(2, 3, dtype=kind) for _ in range(2)] + statistics
        out, *known, mean, var = triton_norm.forward(x, real, own, 0.1, 1e-5)
        back = triton_norm.backward(x, signal, real, own[0], *known)[0]
        found.append((out, mean, var, back))
    return difference(*zip(*found, strict=True))


def cut_and_added(
    shape: tuple[int, ...], taps: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> float:
    """Compare with the form of a CPU."""
    x = torch.randn(shape).permute(0, 4, 1, 2, 3)
    form = patches._Form(x, torch.zeros(len(x), 5, shape[1], *taps), stride, pad)
    [(_, expected)] = form.parts(x)
    signal = torch.randn_like(expected)
    whole, inside = form.padded(x.shape[1], x)
    form.add(whole, signal)
    images = torch.zeros(*inside.shape[:-1], 9)[..., 2 : 2 + x.shape[1]]
    triton_patches.add(form, images, signal)
    return difference((triton_patches.cut(form, x), expected), (images, inside))


def draws(layer: int, call: int, places: int, share: float | None) -> float:
    """Count the places that differ."""
    keys = torch.randint(-(2**63), 2**63 - 1, (3,))
    below = None if share is None else int(share * RANGE)
    got = triton_draws.draws(keys, layer, call, places, below)
    bits = random_bits(keys[:, None], layer, torch.Size((places,)), keys.device, call)
    if below is not None:
        kept = triton_draws.draws(keys, layer, call, places, below, torch.float32, 1.5)
        assert torch.equal(kept, (bits >= below) * 1.5)
    return float((got != (bits if below is None else bits < below)).sum())


def main() -> None:
    torch.manual_seed(0)
    case = CONVOLUTIONS["more padding, rows of taps"]
    found = {f"convolution, {name}": convolution(own) for name, own in CONVOLUTIONS.items()}
    found["convolution, float32 products"] = convolution(case, precision="ieee")
    # The interpreter cannot multiply bfloat16: halves stand for it.
    found["convolution, 16 bits"] = convolution(case, dtype=torch.float16)
    found |= {f"recurrence, {name}": recurrence(*case) for name, case in RECURRENCES.items()}
    found |= {f"LSTM, {name}": long_memory(*case) for name, case in RECURRENCES.items()}
    found["LSTM, rows of several programs"] = long_memory(2, 35, 2, 5)
    for name, kernel in {"recurrence": recurrence, "LSTM": long_memory}.items():
        found[f"{name}, float16"] = kernel(2, 3, 4, 70, "tf32")
    found |= {f"normalisation, {name}": normalisation(*case) for name, case in NORMS.items()}
    found["normalisation, 16 bits"] = half_weights()
    found |= {f"patches, {name}": cut_and_added(*case) for name, case in PATCHES.items()}
    found |= {f"draws, {name}": draws(*case) for name, case in DRAWS.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
