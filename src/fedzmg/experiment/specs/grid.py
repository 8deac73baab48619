"""Specification of a grid: a search over hyper-parameters."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

import itertools
import math
from typing import ClassVar, Literal, Self

import pydantic

from fedzmg import algorithms, tasks
from fedzmg.algorithms.options import known_options, number_options
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.plan import PAPER_RATES, Axes, GridStop, Plan, Seeds
from fedzmg.tasks.task import Task


class GridSpec(Plan):
    """A search over hyper-parameters: short trainings, scored by their last rounds."""

    listing: ClassVar[str] = "fedzmg schema grid"
    tables: ClassVar[tuple[str, ...]] = ("preset", "protocol", "stop", "axes")

    kind: Literal["grid"] = "grid"
    seeds: Seeds = [1000]
    """Seeds of the search; no reported run should use them."""
    rounds: int = pydantic.Field(default=50, ge=1)
    last: int = 10
    """Number of last rounds whose mean metric is the score; a diverged trial scores 0."""
    selection: Literal["tune", "test"] = "tune"
    """Examples that choose: a half that reports nothing, or all test examples, as in the paper."""
    also_by_test: bool = False
    """Also score every point on all test examples, as the paper does. The choice of the grid does
    not change; a study can use the other one (``rates_by = "test"``)."""
    together: int = pydantic.Field(default=0, ge=0)
    """Maximum number of trials that train together; 0: all of an algorithm's."""
    axes: Axes = dict.fromkeys(("client.lr", "server.lr"), PAPER_RATES)
    """Values by option, such as ``client.lr``; by default the paper's learning rates of clients and
    servers. An algorithm without such an option has one axis less."""
    stop: GridStop = GridStop()
    """Early-stopping rule; off by default."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if not 1 <= self.last <= self.rounds:
            raise InputError(f"last = {self.last}: expected 1 to {self.rounds}, the rounds")
        if self.also_by_test and self.selection == "test":
            raise InputError('also_by_test = true: selection = "test" chooses by it already')
        if self.selection == "tune" and self.preset.get("selection") == "test":
            raise InputError(
                'preset.selection = "test" leaves no half to choose by: set selection = "test"'
            )
        bound, halvings = self.stop.best_possible, self.stop.heuristic_halving
        if bound is not None and not (self.stop.cannot_win and math.isfinite(bound)):
            raise InputError(
                f"stop.best_possible = {bound}: a finite number, for stop.cannot_win = true only"
            )
        if sorted(set(halvings) & set(range(1, self.rounds))) != halvings:
            raise InputError(
                f"stop.heuristic_halving = {halvings}: expected rising rounds from 1 to "
                f"{self.rounds - 1}"
            )
        if halvings and self.together:
            raise InputError(
                "stop.heuristic_halving compares all points of an algorithm after the same round: "
                "leave out together"
            )
        return self

    def orders(self) -> dict[str, list[str]]:
        # The order of axes numbers the trials.
        own = {f"order of {n}.axes": list(v.axes or ()) for n, v in self.algorithms.items()}
        return {"order of axes": list(self.axes), **own}

    def packs(self) -> dict[str, int]:
        """Count the packs of every algorithm's trials."""
        trials = {name: len(self.points(name)) * len(self.seeds) for name in self.algorithms}
        return {name: -(-n // (self.together or n)) for name, n in trials.items()}

    def axes_of(self, name: str) -> Axes:
        """Return the axes whose option an algorithm has."""
        axes = self.algorithms[name].axes
        known = known_options(algorithms.get(self.base(name)))
        return {k: v for k, v in (self.axes if axes is None else axes).items() if k in known}

    def points(self, name: str) -> list[dict[str, float]]:
        """Return every combination of an algorithm's axes; the last axis varies fastest."""
        axes = self.axes_of(name)
        return [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]

    def build_task(self) -> Task:
        """Build the task; with ``selection = "test"`` all test examples choose."""
        preset = dict(self.preset)
        if self.selection == "test" and "selection" in tasks.info(self.task).options():
            preset["selection"] = "test"
        return tasks.get(self.task, preset)

    def check(self, task: Task | None = None) -> None:
        own = {f"axis of {n}": (v.axes, [self.base(n)]) for n, v in self.algorithms.items()}
        for what, (axes, names) in {**own, "axis": (self.axes, self.bases())}.items():
            found = [algorithms.get(name) for name in names]
            known = {key for algorithm in found for key in known_options(algorithm)}
            numbers = {key for algorithm in found for key in number_options(algorithm)}
            for key in axes or {}:
                if key not in known:
                    raise unknown(what, key, numbers, f"fedzmg list {names[0]}")
        super().check(task)

    def check_algorithm(self, name: str, task: Task | None) -> None:
        if not self.axes_of(name):
            raise InputError(f"{name} has none of the axes {', '.join(self.axes)}: leave it out")
        both = self.fixed(name).keys() & self.axes_of(name).keys()
        if both:
            raise InputError(f"{name}: {min(both)} is both fixed and an axis: choose one")
        for point in self.points(name):
            self.configured(name, {**self.fixed(name), **point}, task)
