"""Behaviour of a module on a few examples, which decides how it can be trained."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg.tree import Tree, leaves, row, tree_map


def opened(params: Tree) -> Tree:
    """Replace numbers that hide parts of a model, such as a gate that starts at zero."""

    def larger(leaf: Tensor) -> Tensor:
        places = torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
        return leaf.where(leaf.abs() > 1e-3, 0.55 + 0.45 * places.cos())

    return params.map(larger)


def depends_on_batch(batch: Any, others: Any, examples: int) -> bool:
    """Tell whether the first outputs of a batch change when the same examples are with others."""
    for among, lone in zip(leaves(batch), leaves(others), strict=True):
        if not isinstance(among, Tensor) or among.shape[:1] != (examples,):
            continue  # not one output per example: the loss reports this better
        rows = lone.numel() // max(1, among[0].numel())
        known, found = among[:rows].detach().double(), lone.detach().double()
        if known.numel() != found.numel():
            return True
        scale = float(among.detach().abs().nan_to_num().max()) if among.numel() else 0.0
        atol = 1e-3 * scale + 1e-12
        if not torch.allclose(known, found.reshape(known.shape), rtol=0, atol=atol, equal_nan=True):
            return True
    return False


def in_reverse(compute: Callable[..., Any], params: Tree, x: Any) -> Any:
    """Compute outputs of examples in reverse order, and put them back in order."""
    size = len(leaves(x)[0])

    def turned(leaf: Any) -> Any:
        return leaf.flip(0) if isinstance(leaf, Tensor) and leaf.shape[:1] == (size,) else leaf

    return tree_map(turned, compute(params, tree_map(turned, x)))


def couples(loss: Callable[..., Tensor], compute: Callable[[], Any], y: Tensor) -> bool:
    """Tell whether the loss of an example depends on the others of its batch."""
    coupled = False
    with torch.no_grad(), contextlib.suppress(Exception):  # training says where
        losses = loss(many := compute(), y)
        coupled = True  # if it cannot read a single example
        coupled = depends_on_batch(losses, loss(*row((many, y), slice(1))), len(y))
    return coupled


def changes_in_place(train: Callable[[Tree], Any], params: Tree) -> bool:
    """Tell whether a pass changes parameters, tried with some beyond the usual bounds."""
    large = params.map(lambda leaf: 100 * leaf)
    with torch.no_grad(), contextlib.suppress(Exception):
        train(large)
    return any(not torch.equal(large[name], 100 * leaf) for name, leaf in params.items())


def values_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Keep buffers, and sums of frozen parameters, which may be large."""

    def value(t: Tensor) -> Tensor:
        wide = torch.complex128 if t.is_complex() else torch.float64
        return t.detach().sum(dtype=wide) if isinstance(t, nn.Parameter) else t.clone()

    return {name: value(t) for name, t in tensors}


def are_equal(outputs: Any, others: Any) -> bool:
    """Tell whether two passes have the same outputs, bit by bit."""
    pairs = zip(leaves(outputs), leaves(others), strict=True)
    tensors = (pair for pair in pairs if isinstance(pair[0], Tensor))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in tensors)


def shares_hooks(module: nn.Module) -> bool:
    """Tell whether copies of a module share hooks, which are plain functions and may keep state."""
    tables = ((m._forward_hooks, m._forward_pre_hooks) for m in module.modules())
    hooks = (hook for both in tables for table in both for hook in table.values())
    return any(isinstance(hook, types.FunctionType | functools.partial) for hook in hooks)
