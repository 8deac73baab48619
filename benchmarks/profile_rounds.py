"""Time of every GPU kernel in a round of local training.

    python benchmarks/profile_rounds.py mlp cifar100 [--trials 1] [--precision tf32] [--out FILE]

Prints a row per kernel: milliseconds and launches per round, and its share of all kernels. The gap
between the sum of the kernels and the round is time in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, profile

from bench import NEVER, WORKLOADS, wait
from fedzmg.kernels.precision import Precision
from fedzmg.provenance import environment
from fedzmg.simulation import Simulation, Trial


def short(kernel: str) -> str:
    """Drop template arguments and return types from a kernel's name."""
    return re.sub(r"<.*|\(.*", "", kernel.removeprefix("void "))[:80]


def profile_workload(
    name: str, algorithm: str, trials: int, precision: Precision, rounds: int
) -> dict[str, Any]:
    """Profile rounds of one workload after two rounds of warm-up."""
    device = torch.device("cuda")
    task = WORKLOADS[name]()
    task = replace(task, protocol=replace(task.protocol, eval_every=NEVER))
    packed = [Trial.of(algorithm, seed=0, client_lr=0.01 * (1 + i / 1000)) for i in range(trials)]
    simulation = Simulation(
        task, packed, rounds=NEVER, device=device, dtype=torch.float32, engine="auto",
        precision=precision,
    )  # fmt: skip
    for _ in range(3):
        simulation.run_round()
    wait(device)
    began = time.perf_counter()
    for _ in range(rounds):
        simulation.run_round()
    wait(device)
    round_ms = 1e3 * (time.perf_counter() - began) / rounds
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            simulation.run_round()
        wait(device)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[short(event.key)][0] += event.self_device_time_total / 1e3 / rounds
            spent[short(event.key)][1] += event.count / rounds
    total = sum(ms for ms, _ in spent.values())
    kernels = sorted(spent.items(), key=lambda item: -item[1][0])
    return {
        "workload": name,
        "algorithm": algorithm,
        "trials": trials,
        "precision": precision,
        "engine": simulation.choice.path,
        "round_ms": round_ms,
        "kernel_ms": total,
        "kernels": [
            {"name": key, "ms": ms, "launches": launches, "share": ms / total}
            for key, (ms, launches) in kernels
        ],
    }


def main() -> None:
    """Profile the workloads, print a table for each and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--algorithm", default="fedzmg")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--precision", default="tf32", choices=get_args(Precision))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top", type=int, default=15, help="kernels to print")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_rounds.py: no CUDA device; kernels are timed on a GPU")
    profiles = []
    for name in arguments.workloads:
        found = profile_workload(
            name, arguments.algorithm, arguments.trials, arguments.precision, arguments.rounds
        )
        profiles.append(found)
        print(f"\n{name}, {arguments.trials} trials, {arguments.precision}: round "
              f"{found['round_ms']:.2f} ms, kernels {found['kernel_ms']:.2f} ms")  # fmt: skip
        print(f"{'ms':>9} {'share':>6} {'launches':>9}  kernel")
        for row in found["kernels"][: arguments.top]:
            print(f"{row['ms']:9.3f} {row['share']:6.1%} {row['launches']:9.1f}  {row['name']}")
    if arguments.out:
        command = shlex.join(["python", *sys.argv])
        facts = {**environment(torch.device("cuda")), "command": command, "profiles": profiles}
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
