"""Which kernels compute a step: choices that change speed and the last bits, never the result.

Both were found by measurement on small models (``benchmarks/engines.py``):

* A dense layer mapped over clients is computed as ``(W xᵀ)ᵀ``. The gradient of ``W`` then comes
  out in the layout of ``W`` itself, and every later pass over it runs at full speed.
* oneDNN prepares some matrix products anew at every call. On ARM that costs about 0.6 ms each,
  forty times what a small product itself takes; without it torch falls back to plain BLAS.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.backends.mkldnn import set_flags
from torch.overrides import TorchFunctionMode

ONEDNN_BY_DEFAULT = platform.machine().lower() not in ("aarch64", "arm64")


@contextlib.contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    """Use oneDNN's processor kernels, or do without, inside a ``with`` block."""
    before, *_ = set_flags(enabled, _fp32_precision=None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_flags(before, _fp32_precision=None)  # type: ignore[no-untyped-call]


class MappedLayers(TorchFunctionMode):
    """Computes dense layers in the form that is fast when weights differ between clients."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Exchange ``F.linear`` on a batch of vectors; leave everything else."""
        del types
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.ndim != 2:
        return F.linear(input, weight, bias)
    out = (weight @ input.mT).mT
    return out if bias is None else out + bias
