"""Find the order in which a model uses its parameters, and hence its first layer."""

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
    "the order in which the model uses its layers is unknown: the layer declared first counts as "
    "the first"
)


def in_order_of_use(task: Task, params: Tree) -> tuple[Layout, tuple[str, ...]]:
    """Order a model's layout by use; parameters without a part in the loss come last.

    Returns:
        The layout, and notes on its order.
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
        # Used but not seen, as in a custom autograd function.
        if gradient is not None and name not in uses.seen and layout[name].input_axes:
            return layout, (DECLARED,)
    return {name: layout[name] for name in dict.fromkeys([*uses.seen, *layout])}, ()


class _Uses(TorchFunctionMode):
    """Records the order in which parameters first enter operations."""

    def __init__(self, params: Tree) -> None:
        super().__init__()
        self._names = {id(leaf): name for name, leaf in params.items()}
        self.seen: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        # Reading a weight's shape or type is not a use: the result needs no gradient.
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in leaves(made)):
            for one in leaves((args, kwargs or {})):
                if (name := self._names.get(id(one))) is not None:
                    self.seen.setdefault(name)
        return made
