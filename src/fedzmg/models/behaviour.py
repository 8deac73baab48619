"""Behaviour of a module on a few examples, which decides how it can be trained."""

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from fedzmg.tree import leaves


def depends_on_batch(batch: Any, alone: Any, examples: int) -> bool:
    """Tell whether outputs change with the other examples of a batch, such as padding."""
    for among, lone in zip(leaves(batch), leaves(alone), strict=True):
        if not isinstance(among, Tensor) or among.shape[:1] != (examples,):
            continue  # not one output per example: the loss reports this better
        if among[:1].numel() != lone.numel():
            return True
        scale = float(among.abs().nan_to_num().max()) if among.numel() else 0.0
        one, atol = among[:1].double(), 1e-3 * scale + 1e-12
        lone = lone.reshape(one.shape).double()
        if not torch.allclose(one, lone, rtol=0, atol=atol, equal_nan=True):
            return True
    return False


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
