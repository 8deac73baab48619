"""Loss and metric of many models on pooled examples, as statistics that merge by adding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.errors import InputError
from fedzmg.models.kernels import MappedLayers
from fedzmg.models.objective import Objective, PrepareFunction
from fedzmg.tree import Inputs, Tree, row, tree_map


@dataclass(frozen=True)
class Metric:
    """A reported number: one value per example, averaged over examples.

    A mean to maximise must not be negative: a run that diverged counts as 0, and would win. Give
    such a metric with the opposite sign and ``higher_is_better=False``. The first evaluation is
    checked.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not callable(self.function):
            raise InputError(
                f"metric name = {self.name!r}, function = {self.function!r}: expected a text, and "
                "a function of outputs and targets that returns one value per example"
            )

    @property
    def worst(self) -> float:
        """Value recorded for a model that diverged."""
        return worst(self.higher_is_better)

    def check_value(self, value: float | None) -> None:
        """Reject a mean that a diverged model would beat; None: there was no evaluation."""
        if self.higher_is_better and value is not None and value < self.worst:
            raise InputError(
                f"metric {self.name!r} is {value:.6g}: one to maximise must not be negative, as a "
                "diverged run counts as 0; negate it and set higher_is_better=False"
            )

    def check_level(self, key: str, level: float) -> None:
        """Reject a level that no model can reach."""
        if self.name == "accuracy" and not 0 <= level <= 1:
            percent = f", {level / 100:.2f} for {level:g} %" if 1 < level <= 100 else ""
            raise InputError(
                f"{key} = {level:g}: an accuracy is a share, so expected 0 to 1{percent}"
            )


def worst(higher_is_better: bool) -> float:
    """Return the worst value of a metric: 0 for one to maximise, else infinity.

    >>> worst(True), worst(False)
    (0.0, inf)
    """
    return 0.0 if higher_is_better else math.inf


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of right classes per example, over all positions of a sequence."""
    right = (outputs.argmax(-1) == targets).to(outputs.dtype)
    return right.flatten(1).mean(1) if right.ndim > 1 else right


ACCURACY = Metric("accuracy", accuracy)


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
    """Compute mean loss and mean metric of stacked models (first axis) on pooled examples."""

    def total(values: Tensor) -> Tensor:
        return values.sum(dtype=torch.float64)

    each = _for_each_model(params, objective, metric, prepare, total)
    with torch.no_grad(), MappedLayers():
        # A copy: a prepare function may work in place.
        parts = [
            each(*tree_map(torch.clone, row(examples, slice(first, first + chunk))))
            for first in range(0, examples.size, chunk)
        ]
    return functools.reduce(torch.add, parts) / examples.size


def evaluate_by_owner(
    params: Tree,
    examples: Examples,
    positions: Tensor,
    counts: Tensor,
    objective: Objective,
    metric: Metric,
    prepare: PrepareFunction,
    *,
    chunk: int = 500,
) -> Tensor:
    """Compute mean loss and mean metric of stacked models on every owner's examples.

    ``positions`` names the examples, owner after owner; each owner has ``counts`` of them, at least
    one. The result is models x owners x (loss, metric), in double precision.
    """
    each = _for_each_model(params, objective, metric, prepare, Tensor.double)
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    models = len(next(iter(params.values())))
    sums = torch.zeros(models, len(counts), 2, dtype=torch.float64, device=counts.device)
    with torch.no_grad(), MappedLayers():
        for first in range(0, len(positions), chunk):
            part = slice(first, first + chunk)
            sums.index_add_(1, owners[part], each(*row(examples, positions[part])))
    return sums / counts[:, None]


def _for_each_model(
    params: Tree,
    objective: Objective,
    metric: Metric,
    prepare: PrepareFunction,
    reduce: Callable[[Tensor], Tensor],
) -> Callable[[Inputs, Tensor], Tensor]:
    """Build a function of stored inputs and targets: loss and metric of every stacked model.

    A lone model is evaluated beside a copy of itself: a map of width one takes other kernels and
    would move the last bits.
    """
    first = next(iter(params.values()))
    wide = params.map(lambda leaf: torch.cat([leaf, leaf])) if len(first) == 1 else params

    def one(weights: Tree, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = objective.outputs(weights, x)
        return reduce(objective.loss(outputs, y)), reduce(metric.function(outputs, y))

    loop = bool(objective.model.loop_reason)

    def each(x: Inputs, y: Tensor) -> Tensor:
        nonlocal loop
        x = prepare(x, first.dtype)
        if not loop:
            try:
                found = torch.vmap(one, in_dims=(0, None, None))(wide, x, y)
                return torch.stack(found, -1)[: len(first)]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a loop over models raises their own errors once more
                loop = True
        alone = [one(row(wide, i), x, y) for i in range(len(first))]
        return torch.stack([torch.stack(pair, -1) for pair in alone])

    return each


class OverClients(NamedTuple):
    """Distribution of a metric over clients, each of which counts once."""

    mean: float
    sd: float
    median: float
    worst_tenth: float
    """Mean of the worst tenth of the clients; of one client at least."""
    best_tenth: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64], *, higher_is_better: bool = True) -> OverClients:
        """Describe one value per client.

        >>> OverClients.of(np.array([0.1, 0.5, 0.9])).worst_tenth
        0.1
        """
        ranked = np.sort(values) if higher_is_better else np.sort(values)[::-1]
        tenth = max(1, round(len(ranked) / 10))
        low, high = ranked[:tenth].mean(), ranked[-tenth:].mean()
        return cls(*map(float, (ranked.mean(), ranked.std(), np.median(ranked), low, high)))


def share_short_of(
    values: npt.NDArray[np.float64], threshold: float, *, higher_is_better: bool = True
) -> float:
    """Compute the share of clients that do not reach a threshold.

    >>> share_short_of(np.array([0.1, 0.5, 0.9, 0.9]), 0.5)
    0.25
    """
    reached = values >= threshold if higher_is_better else values <= threshold
    return float((~reached).mean())
