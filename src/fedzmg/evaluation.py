"""Loss and metric of many models on pooled examples, as statistics that merge by adding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.errors import InputError
from fedzmg.models.kernels import MappedLayers
from fedzmg.models.objective import Objective, PrepareFunction
from fedzmg.tree import Tree, row


@dataclass(frozen=True)
class Metric:
    """What is reported: one value per example, averaged over examples."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of right classes per example; over all positions where an example is a sequence."""
    right = (outputs.argmax(-1) == targets).to(outputs.dtype)
    return right.flatten(1).mean(1) if right.ndim > 1 else right


ACCURACY = Metric("accuracy", accuracy)


class Statistic(NamedTuple):
    """Sums of loss and metric over examples, one row per model; ``+`` merges."""

    loss: Tensor
    metric: Tensor
    examples: int

    def merged(self, other: Statistic) -> Statistic:
        """The statistic over both sets of examples."""
        return Statistic(
            self.loss + other.loss, self.metric + other.metric, self.examples + other.examples
        )


class Evaluation(NamedTuple):
    """Mean loss and mean metric of one model."""

    loss: float
    metric: float


def evaluate(
    params: Tree,
    examples: Examples,
    objective: Objective,
    metric: Metric,
    prepare: PrepareFunction,
    *,
    chunk: int = 500,
) -> Tensor:
    """Mean loss and mean metric of stacked models (first axis models) on pooled examples.

    A lone model is evaluated beside a copy of itself: a map of width one takes other kernels and
    would move the last bits.
    """
    models = len(next(iter(params.values())))
    dtype = next(iter(params.values())).dtype
    wide: Tree = row(params, [0, 0]) if models == 1 else params

    def one(weights: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = objective.outputs(weights, x)
        loss, score = objective.loss(outputs, y), metric.function(outputs, y)
        return loss.sum(dtype=torch.float64), score.sum(dtype=torch.float64)

    mapped = torch.vmap(one, in_dims=(0, None, None))

    def each(weights: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return mapped(weights, x, y)
        except InputError:  # a model that does not map, which the loop over clients can train
            alone = [one(row(weights, i), x, y) for i in range(len(next(iter(weights.values()))))]
            return torch.stack([a for a, _ in alone]), torch.stack([b for _, b in alone])

    total: Statistic | None = None
    with torch.no_grad(), MappedLayers():
        for first in range(0, examples.size, chunk):
            x, y = (column[first : first + chunk] for column in examples)
            # A copy: a prepare function may work in place.
            part = Statistic(*each(wide, prepare(x.clone(), dtype), y), len(x))
            total = part if total is None else total.merged(part)
    assert total is not None  # Examples are never empty.
    return torch.stack([total.loss, total.metric], 1)[:models] / total.examples
