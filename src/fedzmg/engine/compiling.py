"""``torch.compile`` as engines use it."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def compile_apart(function: Callable[P, T], backend: str = "inductor") -> Callable[P, T]:
    """Compile a function as one graph for fixed shapes, apart from all others of its code.

    The compiler counts recompilations per code object, so the function gets a twin with a code
    object of its own: widths of another task or algorithm in the same process must not use up this
    one's allowance.
    """
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    compiled: Callable[P, T] = torch.compile(twin, fullgraph=True, dynamic=False, backend=backend)
    return compiled
