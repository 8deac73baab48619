"""Loss and metric of many models on pooled examples, as statistics that merge by adding."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedzmg.data.federated import Examples
from fedzmg.errors import InputError
from fedzmg.kernels import MappedLayers
from fedzmg.models.objective import Objective, PrepareFunction
from fedzmg.tree import Inputs, Tree, row, stack, tree_map, vmap

CHUNK = 500  # examples evaluated at once, if their outputs are not large
LOOP_SIZE = 3000  # parameters from which a CPU maps all but dense layers more slowly than it loops
CUDNN_SIZE = 1_000_000  # parameters from which a GPU maps recurrent layers more slowly than loops
LARGEST_OUTPUTS = 2**28  # bytes of a model's outputs computed at once, for several examples


@dataclass(frozen=True)
class Metric:
    """A reported number: one value per example, averaged over examples.

    With ``finish``, the function gives a row of statistics per example, and ``finish`` computes the
    number from their sum, statistics on the last axis; if ``pooled``, from all examples' rows.

    A number to maximise must not be negative: a diverged run counts as 0, and would win. Negate it
    then, with ``higher_is_better=False``. The first evaluation is checked.
    """

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True
    finish: Callable[[Tensor], Tensor] | None = None
    pooled: bool = False  # ``finish`` needs the statistics of every example, not their sum

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not callable(self.function):
            given = f"metric name = {self.name!r}, function = {self.function!r}"
            raise InputError(f"{given}: expected a text and a function of outputs and targets")
        if self.pooled and self.finish is None:
            raise InputError(f"metric {self.name!r} is pooled: give finish=, a function of rows")

    def value(self, statistics: Tensor, count: int | Tensor) -> Tensor:
        """Compute the number from the sum of ``count`` examples' statistics."""
        return statistics / count if self.finish is None else self.finish(statistics)

    def pooled_value(self, rows: Tensor) -> Tensor:
        """Compute the number from the statistics of all examples."""
        assert self.finish is not None
        return self.finish(rows).to(torch.float64)

    def check_values(self, values: Any, examples: int) -> None:
        """Reject a function that does not give a value or a row of statistics per example."""
        check_values(f"metric {self.name}", values, examples, rows=self.finish is not None)
        if self.finish is not None:
            found: Any = self.finish(values if self.pooled else total(values)[None])
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found)
            if given != (expected := () if self.pooled else (1,)):
                problem = f"metric {self.name}: finish gave {given} for statistics of one model"
                raise InputError(f"{problem}: return a tensor of shape {expected}")

    @property
    def worst(self) -> float:
        """Value of a model that diverged: 0 for a metric to maximise, else infinity."""
        return 0.0 if self.higher_is_better else math.inf

    def check_value(self, value: float | None) -> None:
        """Reject a mean that a diverged model would beat; None: there was no evaluation."""
        if self.higher_is_better and value is not None and value < self.worst:
            problem = f"metric {self.name!r} is {value:.6g}, but a diverged run counts as 0"
            raise InputError(f"{problem}: negate it and set higher_is_better=False")

    def check_level(self, key: str, level: float) -> None:
        """Reject a level that no model can reach."""
        if self.name == "accuracy" and not 0 <= level <= 1:
            percent = f", {level / 100:.2f} for {level:g} %" if 1 < level <= 100 else ""
            problem = f"{key} = {level:g}: an accuracy is a share"
            raise InputError(f"{problem}, so expected 0 to 1{percent}")


def check_values(name: str, values: Any, examples: int, *, rows: bool = False) -> None:
    """Reject anything but one value (or one row) per example."""
    shape = values.shape if isinstance(values, Tensor) else None
    if shape is None or len(shape) != 1 + rows or shape[0] != examples:
        got = type(values) if shape is None else tuple(shape)
        each = "one row of statistics" if rows else "one value"
        hint = "flatten(1).mean(1) averages others" if shape else "torch losses: reduction='none'"
        problem = f"the {name} gave {got} for {examples} examples"
        raise InputError(f"{problem}: return {each} per example ({hint})")


def total(values: Tensor) -> Tensor:
    """Sum values or statistics over examples, in double precision."""
    return values.sum(0, dtype=torch.float64)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the share of right classes per example, over all positions of a sequence."""
    if targets.shape == outputs.shape:  # probabilities
        targets = targets.argmax(-1)
    right = (outputs.argmax(-1) == targets).to(outputs.dtype)
    return right.flatten(1).mean(1) if right.ndim > 1 else right


ACCURACY = Metric("accuracy", accuracy)


class Evaluation(NamedTuple):
    """Mean loss and metric of one model."""

    loss: float
    metric: float


def evaluate(
    params: Tree, examples: Examples, objective: Objective, metric: Metric,
    prepare: PrepareFunction, *, chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """Compute mean loss and metric of stacked models (first axis) on pooled examples."""
    each = _for_each_model(params, objective, metric, prepare, total)
    with torch.no_grad(), MappedLayers():
        # A copy: a prepare function may work in place.
        chunks = (row(examples, slice(i, i + chunk)) for i in range(0, examples.size, chunk))
        losses, found = zip(*(each(*tree_map(torch.clone, some)) for some in chunks), strict=True)
        if metric.pooled:
            score = torch.stack([metric.pooled_value(rows) for rows in torch.cat(found, 1)])
        else:
            score = metric.value(functools.reduce(torch.add, found), examples.size)
    return torch.stack([functools.reduce(torch.add, losses) / examples.size, score], -1)


def evaluate_by_owner(
    params: Tree, examples: Examples, positions: Tensor, counts: Tensor, objective: Objective,
    metric: Metric, prepare: PrepareFunction, *, chunk: int = CHUNK,
) -> Tensor:  # fmt: skip
    """Compute loss and metric of models on owners: ``positions`` of ``counts`` examples each."""
    each = _for_each_model(params, objective, metric, prepare, Tensor.double)
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    sums: list[Tensor] = []
    kept: list[Tensor] = []
    with torch.no_grad(), MappedLayers():
        for first in range(0, len(positions), chunk):
            part = slice(first, first + chunk)
            values = list(each(*row(examples, positions[part])))
            if metric.pooled:
                kept.append(values.pop())
            sums = sums or [v.new_zeros(len(v), len(counts), *v.shape[2:]) for v in values]
            for own, value in zip(sums, values, strict=True):
                own.index_add_(1, owners[part], value)
        if metric.pooled:
            whole = [rows.split(counts.tolist()) for rows in torch.cat(kept, 1)]
            score = torch.stack([torch.stack([*map(metric.pooled_value, own)]) for own in whole])
        else:
            score = metric.value(sums[1], counts)
    return torch.stack([sums[0] / counts, score], -1)


def _for_each_model(
    params: Tree, objective: Objective, metric: Metric, prepare: PrepareFunction,
    reduce: Callable[[Tensor], Tensor],
) -> Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """Build a function to evaluate every stacked model."""
    first = next(iter(params.values()))
    # A map of one takes other kernels, with other bits.
    wide = params.map(lambda leaf: torch.cat([leaf, leaf])) if len(first) == 1 else params

    def one(weights: Tree, x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = objective.outputs(weights, x)
        loss, found = reduce(objective.loss(outputs, y)), metric.function(outputs, y)
        return loss, found if metric.pooled else reduce(found)

    size = sum(leaf[0].numel() for leaf in params.values())
    layers = [m for m in objective.model.source.modules() if m._parameters]
    if first.is_cpu:
        slow = size >= LOOP_SIZE and not all(isinstance(m, nn.Linear) for m in layers)
    else:
        slow = size >= CUDNN_SIZE and any(isinstance(m, nn.RNNBase) for m in layers)
    loop = bool(objective.model.loop_reason) or slow

    def each(x: Inputs, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal loop
        x = prepare(x, first.dtype)
        if not loop:
            try:
                loss, score = vmap(lambda model: one(model, x, y))(wide)
                return loss[: len(first)], score[: len(first)]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a loop over models raises their own errors once more
                loop = True
        return stack([one(row(wide, i), x, y) for i in range(len(first))])

    return each


class OverClients(NamedTuple):
    """Distribution of a metric over clients, each of which counts once."""

    mean: float
    sd: float
    median: float
    worst_tenth: float  # mean of the worst tenth of the clients; of one client at least
    best_tenth: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64], *, higher_is_better: bool = True) -> "OverClients":
        """Describe one value per client."""
        ranked = np.sort(values) if higher_is_better else np.sort(values)[::-1]
        tenth = max(1, round(len(ranked) / 10))
        low, high = ranked[:tenth].mean(), ranked[-tenth:].mean()
        return cls(*map(float, (ranked.mean(), ranked.std(), np.median(ranked), low, high)))
