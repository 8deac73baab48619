"""Trials, and the rules that trials of a pack share."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg import algorithms
from fedzmg.algorithms.options import configure
from fedzmg.contract import Algorithm, AlgorithmInfo, bind, map_rule, numbers, structure
from fedzmg.errors import InputError
from fedzmg.tasks.task import Task
from fedzmg.tree import leaves, row
from fedzmg.wrappers.parts import fit

_KEYWORD = re.compile(r"^(client|server|parts)_")
_KEY = re.compile(r"\b(client|server|parts)\.(?=\w)")


@dataclass(frozen=True)
class Trial:
    """One training: an algorithm with its hyper-parameters, and a seed."""

    algorithm: Algorithm
    seed: int = 0
    name: str = field(default="", compare=False)  # name of a variant of the algorithm

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            name = self.algorithm
            remedy = f"Trial.of({name!r})" if isinstance(name, str) else "an Algorithm"
            raise InputError(f"algorithm = {name!r}: expected {remedy}")
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise InputError(f"seed = {self.seed!r}: expected a whole number")

    @classmethod
    def of(
        cls, algorithm: str | Algorithm | AlgorithmInfo, seed: int = 0, task: Task | None = None,
        **options: Any,
    ) -> "Trial":  # fmt: skip
        """Make a trial of an algorithm with some options changed.

        Args:
            algorithm: a name of ``fedzmg list``, or an algorithm of your own.
            seed: controls initial weights, cohorts, batch order and dropout.
            task: take the hyper-parameters that this task recommends for the algorithm.
            **options: changed fields, with ``_`` after the side: ``client_lr=0.03``.
        """
        if task is not None and not isinstance(task, Task):
            raise InputError(f"task = {task!r}: expected a Task, such as tasks.get('digits')")
        if isinstance(algorithm, AlgorithmInfo):
            algorithm = algorithm.algorithm
        base = algorithm if isinstance(algorithm, Algorithm) else algorithms.get(algorithm)
        wanted = {} if task is None else dict(task.options.get(base.name, {}))
        wanted |= {_KEYWORD.sub(r"\1.", keyword): value for keyword, value in options.items()}
        try:
            return cls(configure(base, wanted), seed)
        except InputError as error:
            # Keys in the message must work as keywords here.
            raise InputError(_KEY.sub(r"\1_", str(error))) from None


class PackedRule(NamedTuple):
    """Client or server rule that trials share, and the numbers in which they differ."""

    rule: Any
    numbers: dict[str, Tensor]  # hyper-parameters, one row per trial

    @classmethod
    def of(
        cls, side: str, shared: Algorithm, fitted: Sequence[Algorithm], dtype: torch.dtype,
        device: torch.device,
    ) -> "PackedRule":  # fmt: skip
        """Pack one side, client or server, of algorithms that share everything but numbers."""
        values = [numbers(getattr(algorithm, side)) for algorithm in fitted]
        stacked = {
            path: torch.tensor([own[path] for own in values], dtype=dtype, device=device)
            for path in values[0]
        }
        return cls(getattr(shared, side), stacked)

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Map ``function(rule, *args)`` over trials, the rule bound to each trial's numbers."""
        with torch.no_grad():
            return map_rule(self.rule, function, self.numbers, *args)

    @torch.no_grad()
    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do the same, but for one trial on a CPU without a map, which would be slower."""
        first = leaves(args)[0]
        if len(first) > 1 or not first.is_cpu:
            return self.map(function, *args)
        own, alone = row((self.numbers, args), 0)
        return row(function(bind(self.rule, own), *alone), None)


def packed_rules(
    task: Task, trials: Sequence[Trial], dtype: torch.dtype, device: torch.device
) -> tuple[list[Algorithm], PackedRule, PackedRule]:
    """Fit the trials' algorithms to a task's model; return them and their packed rules."""
    if not trials:
        raise InputError("no trial to simulate: give at least one")
    for other in packs(task, trials)[1:]:
        names = " and ".join(trials[i].algorithm.name for i in (0, other[0]))
        raise InputError(f"trials of {names} differ in more than numbers: simulate them apart")
    shared, known = _shape(task, trials[0]), (task.model.layout, task.parts, len(task.train))
    fitted = [fit(trial.algorithm, *known) for trial in trials]
    client, server = (PackedRule.of(s, shared, fitted, dtype, device) for s in ("client", "server"))
    return fitted, client, server


def packs(task: Task, trials: Sequence[Trial]) -> list[list[int]]:
    """Group trials that can train together, in the order of their first ones."""
    shapes = [_shape(task, trial) for trial in trials]
    found: dict[int, list[int]] = {}
    for i, shape in enumerate(shapes):
        found.setdefault(shapes.index(shape), []).append(i)
    return list(found.values())


def _shape(task: Task, trial: Trial) -> Algorithm:
    own = fit(trial.algorithm, task.model.layout, task.parts, len(task.train))
    merged = own.aggregator and structure(own.aggregator)
    client, server = structure(own.client), structure(own.server)
    return replace(own, name="", client=client, server=server, aggregator=merged)
