"""What a client minimises: a model and a loss, as functions of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fedzmg.models.functional import FunctionalModel
from fedzmg.tree import Tree

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one loss per example."""


class PrepareFunction(Protocol):
    """Stored inputs -> model inputs, e.g. bytes to floats; called on the device."""

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """Convert a batch of stored inputs."""
        ...


class Batch(NamedTuple):
    """One local step's examples; weights sum to one over the real ones."""

    x: Tensor
    y: Tensor
    weights: Tensor
    key: Tensor | tuple[()]


@dataclass(frozen=True)
class Objective:
    """Model and per-example loss."""

    model: FunctionalModel
    loss: LossFunction

    def train(self, params: Tree, batch: Batch) -> Tensor:
        """Weighted loss of a batch, dropout on."""
        outputs = self.model.train(params, batch.x, batch.key)
        return (self.loss(outputs, batch.y) * batch.weights).sum()

    def look(self, params: Tree, batch: Batch) -> Tensor:
        """Weighted loss of a batch, dropout off."""
        return (self.loss(self.model.evaluate(params, batch.x), batch.y) * batch.weights).sum()
