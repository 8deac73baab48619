"""Specification of a study: a comparison of algorithms over seeds."""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import pydantic

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment.specs.plan import Plan, Seeds, StudyStop
from fedzmg.tasks.preset import tuned
from fedzmg.tasks.task import Task

NO_GRID = ("tuned", "known", "given")
"""Values of ``rates`` that do not name the directory of a grid."""


class StudySpec(Plan):
    """A comparison of algorithms on identical cohorts and batches, over several seeds."""

    listing: ClassVar[str] = "fedzmg schema study"

    kind: Literal["study"] = "study"
    seeds: Seeds = [0, 1, 2, 3, 4]
    rounds: int = pydantic.Field(default=1000, ge=1)
    eval_every: int = pydantic.Field(default=5, ge=1)
    client_metrics_every: int = pydantic.Field(default=0, ge=0)
    """Interval of evaluations on each client's own examples: after rounds 1, 1 + N, ... and the
    last; 0: only after the last."""
    rates: str = "tuned"
    """``tuned``: found for the task before; ``known``: the same, else defaults; ``given``: defaults
    and the tables here; otherwise the directory of a finished grid. Options in the tables go
    first."""
    rates_by: Literal["tune", "test"] = "tune"
    """Examples by which the grid's point is chosen: those set aside, or all, as in the paper; then
    all have to report, too, which ``preset.selection = "test"`` says."""
    thresholds: list[float] = []
    """Thresholds of the metric; by default the task's own."""
    window: int = pydantic.Field(default=4, ge=1)
    """Number of evaluations whose average, or smallest, has to reach a threshold."""
    tests: Literal["reference", "pairs"] = "reference"
    """The family of tests: the first algorithm against every other, or every pair."""
    stop: StudyStop = StudyStop()
    """Early-stopping rule; off by default."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        if not all(map(math.isfinite, self.thresholds)):
            raise InputError(f"thresholds = {self.thresholds!r}: expected finite numbers")
        if self.rates_by == "test" and self.rates in NO_GRID:
            raise InputError(
                f'rates_by = "test" chooses among the points of a grid, and rates = {self.rates!r} '
                "names none: leave it out, or name the grid's directory as rates"
            )
        if any(variant.axes is not None for variant in self.algorithms.values()):
            raise InputError("axes belong to a grid: a study has none")
        return self

    def extends(self, kept: Plan) -> bool:
        """Return True if this study only adds algorithms or seeds to another one."""
        added = {"algorithms": self.algorithms, "seeds": self.seeds}
        return (
            all(self.algorithms.get(name) == own for name, own in kept.algorithms.items())
            and set(kept.seeds) <= set(self.seeds)
            and self == kept.model_copy(update=added)
        )

    def orders(self) -> dict[str, list[str]]:
        # The others are tested against the first.
        return {"order of algorithms": list(self.algorithms)}

    def check(self, task: Task | None = None) -> None:
        if task is None:
            can_report_all = "selection" in tasks.info(self.task).options()
            all_report = can_report_all and self.preset.get("selection") == "test"
        else:
            can_report_all = "selection" in task.preset
            all_report = task.tune is None or task.tune.x is task.test.x
            for level in self.thresholds:
                task.metric.check_level("thresholds", level)
        if self.rates_by == "test" and not all_report:
            remedy = 'say preset.selection = "test" as well' if can_report_all else "leave it out"
            raise InputError(
                f'rates_by = "test": {self.task} would report on some of the examples that chose '
                f"its rates, as if they had not: {remedy}"
            )
        super().check(task)

    def remarks(self) -> list[str]:
        """Return remarks on valid settings that may be mistakes."""
        if self.eval_every <= self.rounds:
            return []
        return [
            f"eval_every = {self.eval_every} is more than rounds = {self.rounds}: only the first "
            "and the last round are evaluated; choose a smaller eval_every for curves"
        ]

    def check_algorithm(self, name: str, task: Task | None) -> None:
        super().check_algorithm(name, task)
        known = tuned(self.task) if task is None else task.options
        rated = self.base(name) in known or "lr" in self.algorithms[name].client
        if self.rates == "tuned" and not rated:
            raise InputError(
                f"no rates were found before for {self.base(name)} on {self.task}: name the "
                'directory of a grid as rates, or say rates = "given"'
            )
