"""Functions of tensors that a GPU replays as CUDA graphs.

A round has hundreds of small operations around its local steps. Launching them one by one takes
longer than training a small model.
"""

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedzmg.tree import leaves, num_bytes, tree_map

T = TypeVar("T")
MOST_BYTES = 1 << 31  # of arguments; with more, a GPU is busy enough without a graph
MOST_GRAPHS = 8  # per function; more would only serve cohorts of ever new sizes


class _Graph(NamedTuple):
    arguments: list[Tensor]
    run: Callable[[tuple[Any, ...]], Any]  # (what is still) -> results


class Replayed:
    """A pure function ``(fixed, *tensors)``, replayed as a CUDA graph.

    The first call with a form (``fixed``, shapes and types) runs the function as it is, the second
    captures it. ``fixed`` is everything that the function does not read from tensors. The next call
    overwrites the results. Tensors of ``still``, the last argument if given, are read and written
    in place; a graph belongs to their addresses. A CPU calls the function on the same buffers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graphs: dict[Any, _Graph | None] = {}

    def __call__(self, fixed: Hashable, *arguments: Any, still: Any = None) -> Any:
        """Return what the function returns."""
        values, last = leaves(arguments), () if still is None else (still,)
        places = tuple(value.data_ptr() for value in leaves(last) if value.is_cuda)
        form = fixed, places, tuple((value.shape, value.dtype) for value in values)
        if form not in self._graphs:
            if num_bytes((values, last)) <= MOST_BYTES:
                self._note(form)
            return self._function(fixed, *arguments, *last)
        graph = self._graphs[form]
        if graph is None:
            graph = self._graphs[form] = self._capture(fixed, arguments, last)
        copy_all(graph.arguments, values)
        return graph.run(last)

    def _note(self, form: Any) -> None:
        """Remember a form, so its next call is captured; forget the oldest one."""
        waiting = [known for known, graph in self._graphs.items() if graph is None]
        if waiting and len(self._graphs) >= MOST_GRAPHS:
            del self._graphs[waiting[0]]
        if len(self._graphs) < MOST_GRAPHS:
            self._graphs[form] = None

    def _capture(self, fixed: Hashable, arguments: Any, last: Any) -> _Graph:
        own = copied(arguments)
        called = _Graph(leaves(own), lambda still: self._function(fixed, *own, *still))
        if not (called.arguments or leaves(last))[0].is_cuda:
            return called
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph):
                results = self._function(fixed, *own, *last)
        except Exception:  # a user's function that waits for the device, or too little memory
            return called

        def run(_: tuple[Any, ...]) -> Any:
            graph.replay()
            return results

        return called._replace(run=run)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture a graph with the garbage collector off: freeing another graph would break it."""
    collects, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own
        if collects:
            gc.enable()


def copied(values: T) -> T:
    """Copy tensors that a later call overwrites."""
    own = tree_map(torch.empty_like, values)
    copy_all(leaves(own), leaves(values))
    return own


def copy_all(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors in few launches: mixed types would be copied one by one."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in zip(targets, values, strict=True):
        own = by_type.setdefault(target.dtype, ([], []))
        own[0].append(target)
        own[1].append(value)
    for old, new in by_type.values():
        torch._foreach_copy_(old, new)


def unshared(values: T, known: Any) -> T:
    """Copy tensors that share memory with ``known``, so writing there does not change them."""
    places = {leaf.untyped_storage().data_ptr() for leaf in leaves(known)}
    return tree_map(
        lambda leaf: leaf.clone() if leaf.untyped_storage().data_ptr() in places else leaf, values
    )
