"""Scaling of the cost with packed clients and with the size of the population.

    python benchmarks/scaling.py --device cuda --precision tf32 --out scaling.json

First table: the paper's CIFAR-100 network with 10, 100 and 1,000 clients training together;
milliseconds per client and step should fall, then stay constant. Second table: a small network and
ten clients per round out of a thousand, a hundred thousand and a million. A round should cost the
same, and memory should grow only by the examples. Every population has its own process, whose peak
memory is reported: libraries take some hundred MiB of it, and building the examples takes more than
keeping them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import WORKLOADS, Machine, host_peak_mib, measure, reset_host_peak, time_rounds
from fedzmg.models.networks import mlp
from fedzmg.provenance import environment
from fedzmg.simulation import RoundPlanner, resolve_device
from fedzmg.tasks.task import Task

EXAMPLES, FEATURES = 8, 16


def population(clients: int) -> Task:
    """Make a federation of many small clients."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * EXAMPLES, FEATURES), dtype=np.uint8).astype(np.float16)
    y = rng.integers(0, 4, len(x))
    owner = np.repeat(np.arange(clients), EXAMPLES)
    return Task.from_arrays(
        mlp(FEATURES, 32, outputs=4), x, y, owner, test=(x[:100], y[:100]),
        name=f"{clients:,} clients", cohort=10, batch_size=4, epochs=2,
    )  # fmt: skip


def packed(
    device_name: str, precision: str, trials: list[int], workload: str
) -> list[dict[str, Any]]:
    """Measure one row per number of trials packed together."""
    device = resolve_device(device_name)  # type: ignore[arg-type]
    task, machine = WORKLOADS[workload](), measure(device, precision)  # type: ignore[arg-type]
    rows = []
    for count in trials:
        engine = "compiled" if device.type == "cuda" else "auto"
        timing = time_rounds(
            task, machine, engine=engine, precision=precision, trials=count,  # type: ignore[arg-type]
            rounds=3, device=device,
        )  # fmt: skip
        row = {**timing, "ms_per_client_step": timing["round_ms"] / timing["steps"]}
        rows.append(row)
        print(
            f"{workload}, {timing['clients']:>5} clients side by side ({timing['engine']}): "
            f"{row['ms_per_client_step']:.4f} ms per client and step, "
            f"{timing['round_ms']:.1f} ms per round, peak {timing['peak_mib']:,.0f} MiB",
            flush=True,
        )
    return rows


def one_population(device_name: str, clients: int) -> dict[str, Any]:
    """Measure one population; peak memory is this process's."""
    device = resolve_device(device_name)  # type: ignore[arg-type]
    began = time.perf_counter()
    task = population(clients)
    built = time.perf_counter() - began
    planner = RoundPlanner(task, [0])
    planner.batches(1)
    began = time.perf_counter()
    for round_ in range(2, 102):
        planner.batches(round_)
    planning = (time.perf_counter() - began) / 100
    engine = "cuda_graph" if device.type == "cuda" else "vectorized"
    before = host_peak_mib()
    reset_host_peak()
    # Measuring the machine would take more memory than the smaller populations do.
    unknown = Machine(1.0, 1.0)
    timing = time_rounds(task, unknown, engine=engine, rounds=20, device=device)
    return {
        "clients": clients,
        "build_seconds": built,
        "plan_ms": 1e3 * planning,
        "round_ms": timing["round_ms"],
        "data_mib": clients * EXAMPLES * (FEATURES * 2 + 8) / 2**20,
        "build_mib": before,
        "host_mib": host_peak_mib(),
    }


def main() -> None:
    """Measure both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--workload", default="cifar100", choices=sorted(WORKLOADS))
    parser.add_argument("--trials", default="1,10,100")
    parser.add_argument("--populations", default="1000,100000,1000000")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one_population(arguments.device, arguments.one)))
        return
    trials = [int(count) for count in arguments.trials.split(",") if count]
    rows = packed(arguments.device, arguments.precision, trials, arguments.workload)
    populations = []
    for clients in arguments.populations.split(","):
        command = [sys.executable, __file__, "--device", arguments.device, "--one", clients]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        populations.append(found)
        print(
            f"{found['clients']:>9,} clients: {found['round_ms']:.2f} ms per round, "
            f"{found['plan_ms']:.2f} ms to plan one, {found['host_mib']:,.0f} MiB of host memory "
            f"while training, {found['data_mib']:,.0f} MiB of them examples; "
            f"{found['build_mib']:,.0f} MiB while they were made",
            flush=True,
        )
    if arguments.out:
        facts = environment(resolve_device(arguments.device))
        facts["command"] = " ".join(["python", *sys.argv])
        values = {"environment": facts, "packed": rows, "populations": populations}
        arguments.out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
