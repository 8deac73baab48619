"""How fast a task trains here: a few steps are timed, and no more than a couple of seconds of them.

First one gradient of one client, without anything around it. Only if that says that there is time,
a cohort is trained for a few steps; otherwise the gradient stands for the steps of all clients, and
a third of it, the way forward without the way back, for an evaluation.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from fedzmg.data.federated import Examples, FederatedData
from fedzmg.engine.local import eager_gradient
from fedzmg.evaluation import evaluate
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.models.objective import Batch, Objective
from fedzmg.simulation import Simulation, Trial, resolve_device
from fedzmg.tasks.task import Protocol, Task

SECONDS = 2.0
"""What all measuring may take, as far as it can be foreseen."""
TRIALS = 8
"""Trials that are timed together on a GPU at most; on a CPU many gain nothing."""
STEPS = 2
"""Local steps of each client of the cohort that is timed."""
ROUNDS = 3
TEST_EXAMPLES = 200
FORWARD = 1 / 3
"""Of a gradient, what the way forward takes."""


class Pace(NamedTuple):
    """Seconds that things take."""

    step: float
    """A local step of one client."""
    example: float
    """The evaluation of one example."""
    device: str
    engine: str
    words: str
    """What was measured."""
    extrapolated: bool


def measure(
    task: Task, trial: Trial, trials: int, protocol: Protocol, spec: RunSpec | Plan
) -> Pace:
    """Time training and evaluation.

    Args:
        task: with its data.
        trial: one of those to run.
        trials: how many of them train side by side.
        protocol: cohort and batches.
        spec: device, engine and precision.
    """
    device, dtype = resolve_device(spec.device), DTYPES[spec.dtype]
    objective = replace(task.objective, model=task.model.to(device, dtype))
    batch = min(protocol.batch_size, int(task.train.counts.max()))
    one = _gradient(task, objective, batch, device, dtype)
    engine = spec.engine
    if engine == "auto" and device.type == "cpu":
        engine = "vectorized"  # choosing takes longer than all that is timed here
    if ROUNDS * STEPS * protocol.cohort * one > SECONDS:
        words = f"one gradient of one client on {batch} examples"
        return Pace(one, FORWARD * one / batch, device.type, engine, words, extrapolated=True)
    together = min(TRIALS, trials) if device.type == "cuda" else 1
    short = _shortened(task, protocol)
    simulation = Simulation(
        short,
        [trial] * together,
        # Too few to compile anything, and one more than are run, as the last one evaluates.
        rounds=ROUNDS + 1,
        device=device,
        dtype=dtype,
        engine=engine,
        precision=spec.precision,
    )
    step = _rounds(simulation)
    began = time.perf_counter()
    few = Examples(*(c[:TEST_EXAMPLES] for c in task.test)).to(device, dtype)
    evaluate(simulation.snapshot.params, few, objective, task.metric, task.prepare)
    _wait(device)
    example = (time.perf_counter() - began) / together / few.size
    words = f"{STEPS} steps of {short.protocol.cohort * together} clients"
    return Pace(step, example, device.type, simulation.choice.path, words, extrapolated=False)


def _gradient(
    task: Task, objective: Objective, examples: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Seconds of one gradient on so many examples; a quick one is repeated, once it is warm."""
    x, y = Examples(*(c[:examples] for c in task.train.examples)).to(device, dtype)
    weights = torch.full((examples,), 1 / examples, dtype=dtype, device=device)
    key = torch.tensor(0, device=device) if objective.model.needs_key else ()
    params = task.model.params().map(lambda leaf: leaf.to(device, dtype))
    best, first = float("inf"), time.perf_counter()
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        # A copy: a prepare function may work in place.
        batch = Batch(task.prepare(x.clone(), dtype), y, weights, key)
        eager_gradient(objective.train, params, batch)
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() - first > SECONDS / 4:
            break
    return best


def _rounds(simulation: Simulation) -> float:
    """Seconds of a client's step."""
    best = float("inf")
    for attempt in range(ROUNDS):
        _wait(simulation.device)
        began = time.perf_counter()
        records = simulation.run_round().records
        _wait(simulation.device)
        if attempt:  # the first one warms up, and evaluates
            steps = max(1, sum(record.steps for record in records))
            best = min(best, (time.perf_counter() - began) / steps)
    return best


def _shortened(task: Task, protocol: Protocol) -> Task:
    """The task with one cohort, every client of which has a few steps to do."""
    counts, most = task.train.counts, STEPS * protocol.batch_size
    # Clients with the most examples: those with few may have no step at all.
    chosen = np.sort(np.argsort(-counts, kind="stable")[: protocol.cohort])
    lengths = np.minimum(counts[chosen], most)
    rows = np.concatenate(
        [task.train.offsets[c] + np.arange(n) for c, n in zip(chosen, lengths, strict=True)]
    )
    picked = torch.from_numpy(rows)
    short = FederatedData(
        Examples(*(column[picked] for column in task.train.examples)),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tuple(task.train.names[c] for c in chosen),
    )
    quick = replace(protocol, cohort=len(chosen), epochs=1, eval_every=ROUNDS + 1)
    few = Examples(*(column[:2] for column in task.test))
    return replace(task, train=short, test=few, protocol=quick)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
