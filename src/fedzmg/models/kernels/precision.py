"""Rounding of float32 products on a GPU.

Weights, updates and losses are float32 in every mode. ``tf32`` rounds the factors of matrix
products and convolutions to 10 bits of mantissa, ``bf16`` computes layers in bfloat16; both add in
float32.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Our own GPU kernels can run here; otherwise torch's are used."""

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


@contextlib.contextmanager
def rounding(mode: Precision) -> Iterator[None]:
    """Set the rounding inside a ``with`` block."""
    fast = mode != "float32"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def precision() -> str:
    """Return the present rounding of float32 products, by the name that our kernels use."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
