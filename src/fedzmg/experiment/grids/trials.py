"""Trials of one algorithm's grid: their packs, their evaluations and their log lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedzmg.data.federated import Examples
from fedzmg.experiment.grids.score import counted
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.simulation import Record, Simulation, Trial
from fedzmg.tasks.task import Task


class GridTrial(NamedTuple):
    """One training of a grid."""

    options: dict[str, float]
    seed: int

    def line(self, number: int, record: Record, by_test: float | None = None) -> dict[str, Any]:
        """Return the log line of an evaluated round."""
        return {
            "trial": number,
            "round": record.round,
            "seed": self.seed,
            **self.options,
            "metric": record.metric,
            **({} if by_test is None else {"test_metric": by_test}),
            "loss": record.loss,
            "train_loss": record.train_loss,
            "diverged": record.diverged,
            "seconds": record.seconds,
        }


def trials_of(spec: GridSpec, name: str) -> list[GridTrial]:
    """Return every point under every seed; the position of a trial is its number."""
    return [GridTrial(point, seed) for point in spec.points(name) for seed in spec.seeds]


def packs(spec: GridSpec, trials: Sequence[int]) -> list[list[int]]:
    """Group the numbers of trials that train together."""
    size = spec.together or max(len(trials), 1)
    return [list(trials[i : i + size]) for i in range(0, len(trials), size)]


def built(spec: GridSpec, name: str, task: Task, trials: Iterable[GridTrial]) -> list[Trial]:
    """Build trials with their algorithm."""
    fixed = spec.fixed(name)
    return [
        Trial(spec.configured(name, {**fixed, **trial.options}, task), trial.seed)
        for trial in trials
    ]


def by_test(
    spec: GridSpec, simulation: Simulation, records: Sequence[Record], reporting: Examples
) -> dict[int, float]:
    """Evaluate trials on all test examples, after a round that counts.

    ``records`` are evaluated on the examples that choose; ``reporting`` are the other examples.
    """
    if simulation.round not in counted(spec):
        return {}
    worst = simulation.task.metric.worst
    sizes, found = (simulation.task.test.size, reporting.size), dict[int, float]()
    for i, other in enumerate(simulation.evaluate(reporting)):
        metric = records[i].metric
        if metric is not None and i not in simulation.stopped_trials:
            lost = records[i].diverged or not math.isfinite(other.loss)
            mean = (sizes[0] * metric + sizes[1] * other.metric) / sum(sizes)
            found[i] = worst if lost else mean
    return found


def evaluated(spec: GridSpec, simulation: Simulation, records: list[Record]) -> list[Record]:
    """Evaluate the records of a round if it counts or halves the grid."""
    counts = simulation.round in counted(spec)
    due = counts or simulation.round in spec.stop.heuristic_halving
    active = [i for i in range(len(records)) if i not in simulation.stopped_trials]
    if not due or records[active[0]].metric is not None:
        return records
    worst = simulation.task.metric.worst
    found, scores = list(records), simulation.evaluate()
    for i in active:
        loss, metric = scores[i]
        lost = records[i].diverged or not math.isfinite(loss)
        found[i] = records[i]._replace(
            loss=loss,
            metric=worst if lost else metric,
            # An infinite loss in between is not final: it may become finite again.
            diverged=lost if counts else records[i].diverged,
        )
    return found
