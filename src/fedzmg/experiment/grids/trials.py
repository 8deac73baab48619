"""The trials of one algorithm's grid: all of them, their packs, the rounds that are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedzmg.data.federated import Examples
from fedzmg.experiment.grids.log import GridTrial
from fedzmg.experiment.grids.score import counted
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.simulation import Record, Simulation, Trial
from fedzmg.tasks.task import Task


def trials_of(spec: GridSpec, name: str) -> list[GridTrial]:
    """Every point under every seed; a trial's number is its place here."""
    return [GridTrial(point, seed) for point in spec.points(name) for seed in spec.seeds]


def packs(spec: GridSpec, trials: Sequence[int]) -> list[list[int]]:
    """Numbers of trials that train side by side."""
    size = spec.together or max(len(trials), 1)
    return [list(trials[i : i + size]) for i in range(0, len(trials), size)]


def built(spec: GridSpec, name: str, task: Task, trials: Iterable[GridTrial]) -> list[Trial]:
    """Trials with their algorithm, ready to be simulated."""
    fixed = spec.fixed(name)
    return [
        Trial(spec.configured(name, {**fixed, **trial.options}, task), trial.seed)
        for trial in trials
    ]


def by_test(
    spec: GridSpec, simulation: Simulation, records: list[Record], reporting: Examples
) -> dict[int, float]:
    """The metric of trials on all test examples, after a round that counts.

    Args:
        spec: the grid.
        simulation: its trials.
        records: of the round, evaluated on the examples that choose.
        reporting: the other examples.
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
    """Records of a round, evaluated if it is one that is asked for."""
    counts = simulation.round in counted(spec)
    due = counts or simulation.round in spec.stop.heuristic_halving
    awake = [i for i in range(len(records)) if i not in simulation.stopped_trials]
    if not due or records[awake[0]].metric is not None:
        return records
    worst = simulation.task.metric.worst
    found, scores = list(records), simulation.evaluate()
    for i in awake:
        loss, metric = scores[i]
        lost = records[i].diverged or not math.isfinite(loss)
        found[i] = records[i]._replace(
            loss=loss,
            metric=worst if lost else metric,
            # A look in between is no verdict: a loss too large for a number may come down.
            diverged=lost if counts else records[i].diverged,
        )
    return found
