"""Milliseconds per round of a plain PyTorch loop and of the library's engines, in one run.

    python benchmarks/engines.py [--out benchmarks/results/engines-cpu.json]

Two problems: the ``digits`` preset, and a 54,000-parameter MLP on 10 clients of 40 examples, batch
20, 4 epochs. All paths run the same FedAvg round on the same batches. Their rounds are interleaved
against the effect of a busy machine, and medians are reported.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedzmg import Task, Trial, tasks
from fedzmg.data.plan import ClientBatch
from fedzmg.models import mlp
from fedzmg.provenance import environment
from fedzmg.simulation import Simulation
from fedzmg.tasks.inputs import unit_pixels

LR = 0.05


def mlp_task() -> Task:
    """Build a task on random bytes: speed does not depend on the images."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (10 * 40, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 10, len(x))
    return Task.from_arrays(
        mlp(784, 64, 50, outputs=10), x, y, np.repeat(np.arange(10), 40), test=(x[:2], y[:2]),
        name="mlp", prepare=unit_pixels, cohort=10, batch_size=20, epochs=4,
    )  # fmt: skip


def plain_round(
    task: Task, model: nn.Module, batches: list[ClientBatch]
) -> dict[str, torch.Tensor]:
    """Run one FedAvg round in plain PyTorch, without the library."""
    start = copy.deepcopy(model.state_dict())
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    weight = 0
    x, y = task.train.examples
    for batch in batches:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for indices, count in zip(batch.stream.indices, batch.stream.counts, strict=True):
            rows = torch.from_numpy(indices[:count])
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows].float() / 255), y[rows]).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            total[name] += batch.examples * value
        weight += batch.examples
    model.load_state_dict({name: value / weight for name, value in total.items()})
    return model.state_dict()


def paths(task: Task, compiled: bool) -> dict[str, Callable[[], object]]:
    """Make a function per path that runs one round of local training and aggregation."""
    # Evaluation is off: it is the same work for every path.
    quiet = replace(task, protocol=replace(task.protocol, eval_every=10**9))
    trial = Trial.of("fedavg", 0, client_lr=LR)
    engines = ["sequential", "vectorized", *(["compiled"] if compiled else [])]
    found: dict[str, Callable[[], object]] = {}
    for engine in engines:
        sim = Simulation(
            quiet, [trial], rounds=10**9, device=torch.device("cpu"), dtype=torch.float32,
            engine=engine,  # type: ignore[arg-type]
        )  # fmt: skip
        sim.round = 1
        found[engine] = sim.run_round
        batches = sim.planner.batches(2)
    model = copy.deepcopy(task.model.source)
    return {"plain loop": lambda: plain_round(task, model, batches), **found}


def measure(name: str, task: Task, rounds: int, compiled: bool) -> dict[str, object]:
    """Measure the median milliseconds per round of every path, interleaved."""
    functions = paths(task, compiled)
    setup: dict[str, float] = {}
    for path, function in functions.items():
        began = time.perf_counter()
        function()
        setup[path] = time.perf_counter() - began
        function()
    times: dict[str, list[float]] = {path: [] for path in functions}
    for _ in range(rounds):
        for path, function in functions.items():
            began = time.perf_counter()
            function()
            times[path].append(1e3 * (time.perf_counter() - began))
    medians = {path: statistics.median(values) for path, values in times.items()}
    print(f"\n{name}: {sum(v.numel() for v in task.model.params().values()):,} parameters")
    print(f"{'path':<12} {'ms/round':>9} {'speed-up':>9} {'first round s':>14}")
    for path, value in medians.items():
        gain = medians["plain loop"] / value
        print(f"{path:<12} {value:9.1f} {gain:8.2f}x {setup[path]:14.1f}", flush=True)
    return {"ms_per_round": medians, "first_round_s": setup}


def main() -> None:
    """Measure both problems and print a table each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    compiled = not arguments.no_compile
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    results = {
        "environment": {
            **environment(torch.device("cpu")),
            "command": shlex.join(["python", *sys.argv]),
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "mlp": measure("mlp", mlp_task(), arguments.rounds, compiled),
        "digits": measure("digits", tasks.get("digits"), arguments.rounds, compiled),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
