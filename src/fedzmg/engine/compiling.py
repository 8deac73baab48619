"""``torch.compile`` for engines."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from fedzmg.models.kernels import convolution
from fedzmg.models.kernels.determinism import bits_are_kept
from fedzmg.models.kernels.measurements import code_hash

P = ParamSpec("P")
T = TypeVar("T")


def compile_apart(function: Callable[P, T], backend: str = "inductor") -> Callable[P, T]:
    """Compile a function as one graph for fixed shapes, apart from all others of its code.

    The compiler counts recompilations per code object, so the function gets a twin with a code
    object of its own. Widths of another task or algorithm must not use up its allowance.
    """
    assert isinstance(function, types.FunctionType)
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    compiled: Callable[P, T] = torch.compile(
        twin,
        fullgraph=True,
        dynamic=False,
        backend=_inductor if backend == "inductor" else backend,
    )
    return compiled


def _inductor(graph: Any, inputs: Any) -> Any:
    """Compile with inductor, with everything that our operators depend on in its cache key.

    Inductor finds cached code by the operators of the model. Ours, mapped over clients, also depend
    on this package's code and on measurements.
    """
    from torch._inductor.compile_fx import compile_fx

    own = f"fedzmg {code_hash()} {bits_are_kept()} {convolution.choices()}"
    config = torch.compiler.config
    with config.patch(cache_key_tag=f"{config.cache_key_tag} {own}"):  # type: ignore[attr-defined]
        return compile_fx(graph, inputs)
