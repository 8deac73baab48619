"""fedzmg, with the engine that it chooses itself; and the work for all, which it defines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from bench import NEVER, WORKLOADS
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import RoundPlanner, Simulation, Trial
from fedzmg.tasks.task import Task
from fedzmg.tree import row
from peers.networks import wait
from peers.work import Arrays, Facts, Work, begin
from rivals.published import BENCHMARKS

SEED = 0
TASKS: dict[str, Callable[..., Task]] = {
    **WORKLOADS,
    "pfl-cifar10": lambda clients: BENCHMARKS["pfl-cifar10"].build(scale=clients / 1000),
}


def task_of(facts: Facts) -> Task:
    """Build the workload without evaluation."""
    task = TASKS[facts.network](clients=facts.population)
    if not facts.dropout:
        model = copy.deepcopy(task.model.source)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        task = replace(task, model=FunctionalModel(model))
    return replace(task, protocol=replace(task.protocol, eval_every=NEVER))


def has_dropout(network: str) -> bool:
    """Return True if the workload has dropout."""
    return TASKS[network](clients=10).model.needs_key


def define(facts: Facts, rounds: int) -> Work:
    """Collect the workload's arrays, cohorts, batches and initial model."""
    task = task_of(facts)
    planner = RoundPlanner(task, [SEED])
    streams = [[entry.stream for entry in planner.batches(r)] for r in range(1, rounds + 1)]
    if any((s.counts != s.indices.shape[1]).any() for r in streams for s in r):
        raise ValueError(f"workload {facts.network}: peers are compared on full batches alone")
    x, y = (column.numpy() for column in task.train.examples)
    start = initial_params(task.model, task.init, SEED)
    return Work(
        facts,
        x,
        y,
        np.array([[stream.indices for stream in streams_] for streams_ in streams]),
        {name: leaf.numpy() for name, leaf in start.items()},
    )


def main() -> None:
    """Train all rounds of the work."""
    work, watch = begin()
    facts = work.facts
    simulation = Simulation(
        task_of(facts), [Trial.of("fedavg", SEED, client_lr=facts.lr)], rounds=NEVER,
        device=torch.device(facts.device), dtype=torch.float32, engine="auto",
        precision=facts.precision,  # type: ignore[arg-type]
    )  # fmt: skip

    def model() -> Arrays:
        return {k: v.cpu().numpy() for k, v in row(simulation.snapshot.params, 0).items()}

    for _ in work.batches:
        watch.begin()
        report = simulation.run_round()
        wait(facts)
        watch.end(report.records[0].steps, model)
    watch.report(["fedzmg", "torch"], f"{simulation.choice.path} engine")


if __name__ == "__main__":
    main()
