"""Kernels that give the same bits in every process, at the price of not being the fastest.

On a GPU the last bits depend on which kernel was the fastest when it was measured and on the order
in which threads add. Inside :func:`same_bits` nothing is measured and every sum keeps its order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

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
    before = _by_rule, torch.are_deterministic_algorithms_enabled(), _cudnn()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    _by_rule = True
    # A model with an operator that cannot keep its order is trained all the same, with a warning.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        with config.patch({"deterministic": True} if hasattr(config, "deterministic") else {}):
            yield
    finally:
        _by_rule, enabled, (deterministic, benchmark) = before
        torch.use_deterministic_algorithms(enabled, warn_only=warned)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = benchmark


def _cudnn() -> tuple[bool, bool]:
    return torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
