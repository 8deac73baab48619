"""Measure a machine, and count the operations and bytes of one local step."""

from __future__ import annotations

import contextlib
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedzmg.contract import Algorithm, ClientContext, FullPass
from fedzmg.models.kernels import rounding
from fedzmg.models.kernels.precision import Precision
from fedzmg.models.objective import Batch
from fedzmg.tasks.task import Task
from fedzmg.tree import leaves, num_bytes

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Machine(NamedTuple):
    """Peak operations and bytes per second."""

    name: str
    flops: float
    bandwidth: float


def measure(device: torch.device, precision: Precision) -> Machine:
    """Time a large matrix product in this precision and a large copy."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    kind = torch.bfloat16 if precision == "bf16" and on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    with rounding(precision):
        product = best_seconds(lambda: a @ b, device)
    source = torch.zeros((2**30 if on_gpu else 2**26) // 4, device=device)
    target = torch.empty_like(source)
    copy = best_seconds(lambda: target.copy_(source), device)
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    return Machine(name, 2 * size**3 / product, 2 * source.numel() * 4 / copy)


def best_seconds(
    function: Callable[[], object], device: torch.device, repeats: int = 5, inner: int = 3
) -> float:
    """Return the best time of one call, after a warm-up."""
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
    """Wait until a GPU has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_peak_mib() -> float:
    """Return the process's peak resident memory in MiB.

    On Linux ``getrusage`` starts with the peak of the parent process, ``/proc`` does not.
    """
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    # Linux counts in KiB, macOS in bytes.
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def reset_host_peak() -> None:
    """Reset the peak to the current size, where the system can."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


class Cost(NamedTuple):
    """Least work of one local step of one client."""

    flops: int
    """Operations of matrix products and convolutions, forward and backward."""
    bytes: int
    """Bytes of parameters, gradients, state and kept activations, counted once per pass
    (forward, backward, update) that moves them."""


def step_cost(task: Task, algorithm: Algorithm) -> Cost:
    """Count a step on a batch of the task's own size."""
    params = task.model.params()
    dtype = next(iter(params.values())).dtype
    size = task.protocol.batch_size
    rows = torch.arange(size) % task.train.examples.size
    x, y = (column[rows] for column in task.train.examples)
    key: Any = torch.zeros((), dtype=torch.int64) if task.model.needs_key else ()
    batch = Batch(task.prepare(x, dtype), y, torch.full((size,), 1 / size), key)
    tracked = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves(tracked)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = max(kept.get(address, 0), tensor.numel() * tensor.element_size())
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.objective.train(tracked, batch)
        torch.autograd.grad(loss, list(tracked.values()), allow_unused=True)
    model = num_bytes(params)
    fitted = algorithm.for_layout(task.model.layout)
    rule, server = fitted.client, fitted.server
    shared = server.share(server.init(params))
    context = ClientContext(
        params, shared, rule.init_memory(params), torch.tensor(1), torch.tensor(size)
    )
    full_pass = FullPass(torch.zeros(()), params.zeros()) if rule.full_pass != "never" else ()
    state = sum(t.numel() * t.element_size() for t in leaves(rule.begin(context, full_pass)))
    # Weights: read forward, read backward, read and written by the update. Gradients: written,
    # read. State: read, written. Activations: written forward, read backward.
    moved = 4 * model + 2 * model + 2 * state + 2 * sum(kept.values())
    return Cost(int(counter.get_total_flops()), int(moved))
