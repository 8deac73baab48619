"""The order in which a model uses its parameters, which is what "the first layer" means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fedzmg.contract import Layout
from fedzmg.data.federated import Examples
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, leaves

DECLARED = (
    "the model could not be followed while it read an example: its first layer is taken to be the "
    "one that was declared first"
)


def in_order_of_use(task: Task, params: Tree) -> tuple[Layout, tuple[str, ...]]:
    """The layout of a task's model in the order in which it reads an example.

    Parameters that take no part in the loss come last.

    Args:
        task: names the model, and has the example.
        params: any parameters of it.

    Returns:
        The layout, and what a reader should know about its order.
    """
    layout = task.model.layout
    own = params.map(lambda leaf: leaf.detach().clone().requires_grad_())
    dtype = next(iter(own.values())).dtype
    x, y = Examples(*(c[:1].clone() for c in task.train.examples)).to(torch.device("cpu"), dtype)
    with torch.enable_grad():
        with _Uses(own) as uses:
            outputs = task.model.evaluate(own, task.prepare(x, dtype))
        found = torch.autograd.grad(
            task.loss(outputs, y).sum(), list(own.values()), allow_unused=True
        )
    for name, gradient in zip(own, found, strict=True):
        # Used, yet not seen: by code that is not Python's, such as a custom function.
        if gradient is not None and name not in uses.seen and layout[name].input_axes:
            return layout, (DECLARED,)
    return {name: layout[name] for name in dict.fromkeys([*uses.seen, *layout])}, ()


class _Uses(TorchFunctionMode):
    """Notes which of some tensors enter operations, in the order of their first one."""

    def __init__(self, params: Tree) -> None:
        super().__init__()
        self._names = {id(leaf): name for name, leaf in params.items()}
        self.seen: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        # To ask a weight for its shape or its type is no use of it: nothing comes to need a
        # gradient by that.
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves(made)):
            for one in leaves((args, kwargs or {})):
                if (name := self._names.get(id(one))) is not None:
                    self.seen.setdefault(name)
        return made
