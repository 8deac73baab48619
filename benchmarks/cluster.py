"""Scaling on a Ray cluster of this machine, and a model of larger ones from measured parts.

    OMP_NUM_THREADS=1 python benchmarks/cluster.py --out cluster.json

First table: packs of equal size with 1 and 2 workers. The time counts from the first round of the
first worker, because a worker starts once and trains for hours. Second table: one run of 10,000
clients a round out of a population, in shards. Third table: the wall time of a thousand packs on 8,
64 and 512 GPUs, from the start of a worker and the time between two packs measured here, and packs
of ten minutes. Every line is measured in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fedzmg import Task, plugins
from fedzmg.bench import environment, host_peak_mib
from fedzmg.cluster.connect import connected
from fedzmg.cluster.estimate import wall_seconds
from fedzmg.cluster.packs import Packs
from fedzmg.cluster.shards import train_run
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.specs.files import StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.models.networks import mlp
from fedzmg.simulation import RoundReport

CLIENTS, EXAMPLES, FEATURES = 1_000_000, 8, 16
POPULATION = f"population_{CLIENTS}"
GPUS, PACKS, PACK_SECONDS = (8, 64, 512), 1000, 600.0


def population() -> Task:
    """Make a federation of many small clients."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * EXAMPLES, FEATURES), dtype=np.uint8).astype(np.float16)
    y, owner = rng.integers(0, 4, len(x)), np.repeat(np.arange(CLIENTS), EXAMPLES)
    return Task.from_arrays(
        mlp(FEATURES, 32, outputs=4), x, y, owner, test=(x[:1000], y[:1000]), name=POPULATION,
        cohort=10_000, batch_size=4, epochs=2,
    )  # fmt: skip


TASKS = (population(),) if "--one-run" in sys.argv or __name__.startswith("fedzmg_plugin") else ()


class Clock(Silent):
    """Records the seconds of messages and rounds."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.first = 0.0

    def say(self, text: str) -> None:
        if text.startswith("round:") and not self.first:
            self.first = time.perf_counter()
        if ": trained," in text:
            self.ends.append(time.perf_counter())

    def advance(self, report: RoundReport) -> None:
        self.ends.append(time.perf_counter())


def packs(workers: int, rounds: int) -> dict[str, Any]:
    """Train eight equal packs of one run each; return times of a pack and between packs."""
    names = {f"a{i}": {"algorithm": "fedavg", "client": {"lr": 0.1}} for i in range(8)}
    spec = StudySpec.parse(
        {"task": "digits", "algorithms": names, "seeds": [0], "rounds": rounds, "rates": "known",
         "eval_every": rounds, "engine": "vectorized", "device": "cpu", "deterministic": True}
    )  # fmt: skip
    clock, began = Clock(), time.perf_counter()
    with connected(f"ray:{workers}") as cluster, tempfile.TemporaryDirectory() as out:
        connect = time.perf_counter() - began
        began = time.perf_counter()
        result = run_study(spec, Path(out), progress=clock, remote=Packs(cluster))
        whole = time.perf_counter() - began
    trained = [run.seconds for run in result.study.runs]
    busy = sum(trained)
    # The first packs of the workers include their start.
    steady = clock.ends[-1] - clock.ends[workers - 1]
    return {
        "workers": workers, "connect_seconds": connect, "wall_seconds": whole,
        "start_seconds": clock.ends[0] - began - trained[0],
        "packs_per_second": (len(trained) - workers) / steady,
        "between_seconds": max(0.0, (steady * workers - busy * 6 / 8) / (len(trained) - workers)),
    }  # fmt: skip


def one_run(workers: int, rounds: int) -> dict[str, Any]:
    """Train 10,000 clients a round in 8 shards; return the time of a round and peak memory."""
    plugins.load(__file__)
    spec = RunSpec(
        task=POPULATION, algorithm="fedavg", shards=8, engine="vectorized", device="cpu",
        protocol={"rounds": rounds, "eval_every": rounds},
    )  # fmt: skip
    task, clock = spec.build_task(), Clock()
    with connected(f"ray:{workers}") as cluster, tempfile.TemporaryDirectory() as out:
        history = train_run(cluster, task, spec.resolve(task), Path(out) / "run", clock)
        children = psutil.Process().children(recursive=True)
        peak = sum(child.memory_info().rss for child in children) / 2**20
    each = np.diff(clock.ends)[:-1]
    return {
        "workers": workers, "round_seconds": float(np.median(each)), "driver_mib": host_peak_mib(),
        "workers_mib": peak, "metric": history.records[-1].metric,
    }  # fmt: skip


def measured(what: str, workers: int, rounds: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, f"--one-{what}", str(workers), "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-packs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one-run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=40, help="Rounds of a pack.")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for what, measure in (("one_packs", packs), ("one_run", one_run)):
        if workers := getattr(arguments, what):
            print(json.dumps(measure(workers, arguments.rounds)))
            return
    rows = [measured("packs", workers, arguments.rounds) for workers in (1, 2)]
    efficiency = rows[1]["packs_per_second"] / rows[0]["packs_per_second"] / 2
    for row in rows:
        print(
            f"{row['workers']} workers: {60 * row['packs_per_second']:.1f} packs a minute, "
            f"{row['start_seconds']:.1f} s to start, {row['between_seconds']:.2f} s between packs"
        )
    print(f"efficiency of 2 workers: {efficiency:.2f}")
    runs = [measured("run", workers, 5) for workers in (1, 2)]
    for run in runs:
        print(
            f"one run, {run['workers']} workers: {run['round_seconds']:.2f} s per round of 10,000 "
            f"of {CLIENTS:,} clients, {run['driver_mib']:,.0f} MiB in the driver, "
            f"{run['workers_mib']:,.0f} MiB in all other processes"
        )
    start = max(row["start_seconds"] for row in rows)
    model = []
    for gpus in GPUS:
        wall = wall_seconds([PACK_SECONDS] * PACKS, gpus, start)
        model.append({"gpus": gpus, "wall_seconds": wall})
        used = PACKS * PACK_SECONDS / wall / gpus
        print(
            f"model, {gpus} GPUs: {PACKS} packs of 10 min in {wall / 60:.0f} min, {used:.0%} busy"
        )
    if arguments.out:
        facts = environment(torch.device("cpu"))
        facts["command"] = " ".join(["python", *sys.argv])
        values = {"environment": facts, "packs": rows, "efficiency": efficiency}
        arguments.out.write_text(
            json.dumps({**values, "run": runs, "model": model}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
