"""Behaviour of a module on a few examples, which decides how it can be trained."""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg.tree import Tree, leaves, row


def depends_on_batch(batch: Any, alone: Any, examples: int) -> bool:
    """Tell whether outputs change with the other examples of a batch, such as padding."""
    for among, lone in zip(leaves(batch), leaves(alone), strict=True):
        if not isinstance(among, Tensor) or among.shape[:1] != (examples,):
            continue  # not one output per example: the loss reports this better
        among, lone = among.detach(), lone.detach()
        if among[:1].numel() != lone.numel():
            return True
        scale = float(among.abs().nan_to_num().max()) if among.numel() else 0.0
        one, atol = among[:1].double(), 1e-3 * scale + 1e-12
        lone = lone.reshape(one.shape).double()
        if not torch.allclose(one, lone, rtol=0, atol=atol, equal_nan=True):
            return True
    return False


def couples(loss: Callable[..., Tensor], outputs: Any, y: Tensor) -> bool:
    """Tell whether the loss of an example depends on the others of its batch; outputs repeat."""
    coupled = False
    with torch.no_grad(), contextlib.suppress(Exception):  # training says where
        many = row(outputs, torch.arange(len(y)) % len(leaves(outputs)[0]))
        losses = loss(many, y)
        coupled = True  # if it cannot read a single example
        coupled = depends_on_batch(losses, loss(*row((many, y), slice(1))), len(y))
    return coupled


def changes_in_place(train: Callable[[Tree], Any], params: Tree) -> bool:
    """Tell whether a pass changes parameters, tried with some beyond the usual bounds."""
    large = params.map(lambda leaf: 100 * leaf)
    with torch.no_grad(), contextlib.suppress(Exception):
        train(large)
    return any(not torch.equal(large[name], 100 * leaf) for name, leaf in params.items())


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
