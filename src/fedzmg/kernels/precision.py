"""Settings and measurements that decide the last bits on a GPU: rounding, choice of kernels.

Weights, updates and losses are float32 in every mode. ``tf32`` rounds the factors of matrix
products and convolutions to 10 bits of mantissa. ``bf16`` computes layers and their gradients in
bfloat16, as torch's autocast does. Both add in float32. Inside :func:`same_bits` no kernel is
chosen by measurement and every sum keeps its order.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

Precision = Literal["float32", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
DEFAULT_PRECISION: Precision = "tf32"  # of a GPU, as in JAX; a CPU computes in float32
HAS_TRITON = importlib.util.find_spec("triton") is not None  # else torch's GPU kernels are used


@contextlib.contextmanager
def rounding(mode: Precision) -> Iterator[None]:
    """Set the rounding inside a ``with`` block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode != "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def precision() -> str:
    """Return the present rounding of float32 products, by the name that our kernels use."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def suits_kernels(x: Tensor) -> bool:
    """Tell whether our GPU kernels can compute with a tensor."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and HAS_TRITON


def narrowed(weights: Tensor, rounding: str) -> Tensor:
    """Return float32 weights as float16 for TF32, which rounds to as many bits of mantissa."""
    if rounding != "tf32" or weights.dtype != torch.float32:
        return weights
    most = torch.finfo(torch.float16).max
    return weights.clamp(-most, most).to(torch.float16)


def clients_first(x: Tensor, axis: int) -> Tensor:
    """Move clients to the first axis; no view if they are there, which the compiler would copy."""
    return x if axis == 0 else x.movedim(axis, 0)


def within_reach(x: Tensor) -> Tensor:
    """Copy clients that are too far apart in memory for the 32-bit offsets of our kernels."""
    far = sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x if far < 1 << 31 else x.contiguous()


def crowd(clients: int) -> int:
    """Return the size class of a number of clients; kernels are chosen for each class."""
    return next((most for most in (16, 128) if clients <= most), 1024)


_by_rule = False


def bits_are_kept() -> bool:
    """Tell whether kernels must be chosen by rule instead of by measurement."""
    return _by_rule


@contextlib.contextmanager
def same_bits(on: bool) -> Iterator[None]:
    """Choose kernels by rule inside a ``with`` block, if ``on``; a CPU always does."""
    global _by_rule
    if not on:
        yield
        return
    from torch._inductor import config

    # cuBLAS reads this when it is set up; without, it may split sums differently from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = _by_rule, cudnn.deterministic, cudnn.benchmark
    enabled = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    _by_rule = True
    # A model with an operator that cannot keep its order is trained all the same, with a warning.
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with config.patch({"deterministic": True} if hasattr(config, "deterministic") else {}):
            yield
    finally:
        _by_rule, cudnn.deterministic, cudnn.benchmark = before
        torch.use_deterministic_algorithms(enabled, warn_only=warned)


TIMES = 5


def milliseconds(call: Callable[[], object]) -> list[float]:
    """Time a call on the GPU some times, without the time that Python takes to launch it."""
    # Steps are replayed from graphs, where launches cost next to nothing. Timed from Python, small
    # kernels would be compared by the number of their launches instead of by their work.
    call()  # the first use, which compiles and loads, is not timed
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Other threads may continue to use the device.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(TIMES):
                call()
        finally:
            graph.capture_end()
    graph.replay()
    events = [timer() for _ in range(TIMES + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / TIMES for begin, end in pairwise(events)]


def fastest(calls: Mapping[str, Callable[[], object]]) -> tuple[str, bool]:
    """Name the fastest of some calls on the GPU, and tell whether all its timings are the best."""
    times = {name: milliseconds(call) for name, call in calls.items()}
    found = min(times, key=lambda name: min(times[name]))
    return found, all(max(times[found]) <= min(times[name]) for name in times if name != found)


def timer() -> torch.cuda.Event:
    """Make an event on the device's own clock."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cached_answer(question: str, measure: Callable[[], tuple[str, bool]]) -> str:
    """Return the answer that the same code found before to the same question, or a new one.

    A measurement that is not sure, such as that of a busy GPU, is not kept for other processes.
    """
    from triton.runtime.cache import get_cache_manager

    asked = f"{code_hash()} {torch.__version__} {torch.version.cuda} {question}"
    store = get_cache_manager(hashlib.sha256(asked.encode()).hexdigest())
    with contextlib.suppress(OSError, ValueError, TypeError):  # damaged or not there
        return str(json.loads(Path(store.get_file("fedzmg.json")).read_text()))
    answer, sure = measure()
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time, nothing else
        if sure:
            store.put(json.dumps(answer), "fedzmg.json", binary=False)
    return answer


@functools.cache
def code_hash() -> str:
    """Hash the kernels and the code that chooses between them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
