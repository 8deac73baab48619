"""Cost of every algorithm's local training beside FedAvg's, in one run.

    python benchmarks/algorithms.py [--out benchmarks/results/algorithms-cpu.json]
    python benchmarks/algorithms.py --task digits --algorithms fedsam moon

By default the 54,000-parameter MLP of ``engines.py``, vectorized engine, one trial of 10 clients.
Rounds of the algorithms are interleaved against the effect of a busy machine, and medians are
reported. The last column divides by the gradients that a step takes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch

from engines import mlp_task
from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.errors import InputError
from fedzmg.provenance import environment
from fedzmg.simulation import Simulation, Trial


def local_training(name: str, task: tasks.Task) -> tuple[Simulation, list[float]]:
    """Build a simulation and an empty list of its times."""
    simulation = Simulation(
        task, [Trial.of(name)], rounds=10**6, device=torch.device("cpu"),
        dtype=torch.float32, engine="vectorized",
    )  # fmt: skip
    return simulation, []


def main() -> None:
    """Print milliseconds per local step of a cohort, and the ratio to FedAvg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--task", help="a preset in place of the MLP")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = tasks.get(arguments.task) if arguments.task else mlp_task()
    names = dict.fromkeys(["fedavg", *arguments.algorithms])
    runs = {}
    for name in names:
        try:
            runs[name] = local_training(name, task)
        except InputError as error:  # such as FedBN on a model without BatchNorm
            print(f"left out: {name} ({error})")
    for repeat in range(arguments.rounds + 2):
        for simulation, times in runs.values():
            probe = simulation.probe()
            began = time.perf_counter()
            for _ in simulation.engine.train(*probe):
                pass
            if repeat > 1:  # after warming up
                steps = probe.steps
                times.append(1e3 * (time.perf_counter() - began) / steps)
    medians = {name: statistics.median(times) for name, (_, times) in runs.items()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{'algorithm':<24} {'ms/step':>8} {'x FedAvg':>9} {'per gradient':>13}")
    for name, value in sorted(medians.items(), key=lambda item: item[1]):
        ratio = value / medians["fedavg"]
        gradients = ALGORITHMS[name].algorithm.client.gradients_per_step
        print(f"{name:<24} {value:8.2f} {ratio:9.2f} {ratio / gradients:13.2f}")
    if arguments.out:
        made = {**environment(torch.device("cpu")), "command": shlex.join(["python", *sys.argv])}
        facts = {
            "environment": made,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        report = {**facts, "machine": platform.machine(), "ms_per_step": medians}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
