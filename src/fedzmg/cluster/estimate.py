"""Estimated wall time of a specification in several processes, from measured parts."""

import contextlib
import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedzmg.cluster.connect import Cluster
from fedzmg.cluster.packs import split
from fedzmg.cluster.processes import cores
from fedzmg.experiment.estimate import step_operations
from fedzmg.experiment.specs.files import GridSpec, Spec
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import MissingGrid, study_packs
from fedzmg.simulation import resolve_device
from fedzmg.tasks.task import Task

START_SECONDS = 7.0  # start of a worker: process, imports and data (measured on two idle cores)
TASK_SECONDS = 1.0  # time between two packs of a worker (measured on two idle cores)
LONG_SECONDS = 10.0  # training time from which on processes pay for their start
WORTH_SPLITTING = 3  # trials of a process for which a pack is split: fewer are mapped less well
STEP_SECONDS, OPERATIONS = 2e-4, 5e9  # of a client's step; and operations of a core in a second


def by_default(spec: Plan, task: Task) -> str | None:
    """Return ``processes:N`` for long trainings of several packs or many trials on a CPU.

    Counts decide, not measured times: they fix the threads of a worker, and so its last bits.
    """
    parts = _packs(spec, task)
    trials = sum(map(len, parts.values()))
    # OMP_NUM_THREADS limits this number, too; without it torch counts cores, not hyper-threads.
    number = min(cores(), torch.get_num_threads(), _at_once(spec, parts))
    too_few = len(parts) == 1 and trials < WORTH_SPLITTING * number
    on_cpu = sys.platform == "linux" and resolve_device(spec.device).type == "cpu"
    if number == 1 or too_few or not on_cpu or spec.deterministic:
        return None
    protocol = task.protocol.with_options(spec.protocol)
    examples = protocol.epochs * float(task.train.counts.mean())
    steps = trials * spec.rounds * protocol.cohort * max(1.0, examples / protocol.batch_size)
    each = STEP_SECONDS
    with contextlib.suppress(Exception):  # a mistake of a model is reported where it trains
        each += step_operations(replace(task, protocol=protocol)) / OPERATIONS
    return f"processes:{number}" if steps * each > LONG_SECONDS else None


def wall_seconds(packs: Sequence[float], workers: int) -> float:
    """Return the end of the last pack, each of which begins on the first free worker.

    >>> wall_seconds([1.0, 1.0, 4.0], 2) - START_SECONDS - 2 * TASK_SECONDS
    5.0
    """
    free = [START_SECONDS] * max(1, workers)
    for seconds in packs:
        heapq.heapreplace(free, free[0] + seconds + TASK_SECONDS)
    return max(free)


def estimate_on(cluster: Cluster, spec: Spec, found: dict[str, Any]) -> dict[str, Any]:
    """Add the number of workers and the wall time on a cluster to the cost of a specification.

    The time of a trial is measured here; workers of another kind take another time.
    """
    needs = cluster.needs(spec.device)
    workers = cluster.workers(needs)
    if isinstance(spec, RunSpec):
        parts = [1] * max(1, spec.shards)
    else:
        keep = bool(needs.gpus) and spec.deterministic
        packs = _packs(spec, spec.build_task())
        workers = min(workers, _at_once(spec, packs))
        parts = [len(own) for _, own in split(packs, 0 if keep else workers)]
    facts = {"on": cluster.on, "workers": workers, "packs": len(parts), "wall_seconds": None}
    if found["seconds"] is not None:
        each = found["seconds"] / sum(parts)
        facts["wall_seconds"] = wall_seconds([each * trials for trials in parts], workers)
    return {**found, **facts}


def _at_once(spec: Plan, packs: Mapping[Any, Sequence[int]]) -> int:
    """Count the largest number of parts of packs that can train at the same time."""
    if isinstance(spec, GridSpec) and spec.search.halving:
        return len(packs)
    if isinstance(spec, GridSpec) and spec.search.method == "optuna":  # one batch at a time
        return len(spec.algorithms) * spec.search.batch * len(spec.seeds)
    return sum(map(len, packs.values()))


def _packs(spec: Any, task: Task) -> dict[Any, list[int]]:
    if isinstance(spec, GridSpec):
        alone = spec.search.halving
        numbers = {name: 1 if alone else number for name, number in spec.packs().items()}
        return {
            (name, i): list(range(i, spec.trials(name), number))
            for name, number in numbers.items()
            for i in range(number)
        }
    try:
        found = study_packs(spec, task).values()
    except MissingGrid:  # the packs depend on the options that the grid will find
        found = [[name] for name in spec.algorithms]  # type: ignore[assignment]
    return {i: list(range(len(own) * len(spec.seeds))) for i, own in enumerate(found)}
