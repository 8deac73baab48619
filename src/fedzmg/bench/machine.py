"""What a device can do, measured: the rate of its matrix products and of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fedzmg.models.kernels import rounding
from fedzmg.models.kernels.precision import Precision


class Machine(NamedTuple):
    """Operations and bytes per second, best of several."""

    name: str
    flops: float
    bandwidth: float


def measure(device: torch.device, precision: Precision) -> Machine:
    """The rate of one large product in this precision, and of copying a large array."""
    on_card = device.type == "cuda"
    size = 8192 if on_card else 1024
    kind = torch.bfloat16 if precision == "bf16" and on_card else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    with rounding(precision):
        product = best_seconds(lambda: a @ b, device)
    source = torch.zeros((2**30 if on_card else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    copy = best_seconds(lambda: target.copy_(source), device)
    name = torch.cuda.get_device_name(device) if on_card else "processor"
    return Machine(name, 2 * size**3 / product, 2 * source.numel() * 4 / copy)


def best_seconds(
    function: Callable[[], object], device: torch.device, repeats: int = 5, inner: int = 3
) -> float:
    """Seconds of one call, after a warm-up."""
    function()
    best = float("inf")
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        for _ in range(inner):
            function()
        wait(device)
        best = min(best, (time.perf_counter() - began) / inner)
    return best


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
