"""Scaling on a Ray cluster of this machine, and a model of larger ones from measured parts.

    OMP_NUM_THREADS=1 python benchmarks/cluster.py --out cluster.json

Table 1: equal packs (``--packs``) with 1, 2, 4, ... workers (``--workers``). The efficiency is
t1 / (n tn), where tn is the time from the start of the first pack to the end of the last one. The
start of the cluster and of its workers is a column of its own. Table 2, with a GPU: two workers
that share it, and their metrics compared with those of a local study. Table 3: the wall time of a
thousand packs of ten minutes on 8, 64 and 512 GPUs, from the parts measured here. All this takes
four minutes. ``--population`` adds one run of 10,000 clients a round out of a million, in shards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from bench import host_peak_mib
from fedzmg import Task, plugins
from fedzmg.cluster.connect import Cluster, connected
from fedzmg.cluster.estimate import wall_seconds
from fedzmg.cluster.packs import Packs
from fedzmg.cluster.shards import train_run
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.specs.files import StudySpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.study import run_study
from fedzmg.models.networks import mlp
from fedzmg.provenance import environment
from fedzmg.simulation import RoundReport

ALGORITHMS = ["fedavg", "fedzmg", "fedadam", "scaffold"]
CLIENTS, EXAMPLES, FEATURES = 1_000_000, 8, 16
POPULATION = f"population_{CLIENTS}"
GPUS, MANY_PACKS, PACK_SECONDS = (8, 64, 512), 1000, 600.0


def population() -> Task:
    """Make a federation of many small clients."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (CLIENTS * EXAMPLES, FEATURES), dtype=np.uint8).astype(np.float16)
    y, owner = rng.integers(0, 4, len(x)), np.repeat(np.arange(CLIENTS), EXAMPLES)
    return Task.from_arrays(
        mlp(FEATURES, 32, outputs=4), x, y, owner, test=(x[:1000], y[:1000]), name=POPULATION,
        cohort=10_000, batch_size=4, epochs=2,
    )  # fmt: skip


TASKS = (population(),) if __name__.startswith("fedzmg_plugin") else ()


def study(names: Any, rounds: int, device: str) -> StudySpec:
    """Make a study whose packs are one run each."""
    engine = "vectorized" if device == "cpu" else "cuda_graph"
    return StudySpec.parse(
        {"task": "digits", "algorithms": names, "seeds": [0], "rounds": rounds, "rates": "known",
         "eval_every": rounds, "engine": engine, "device": device, "deterministic": True}
    )  # fmt: skip


def train(spec: StudySpec, out: Path, cluster: Cluster | None = None) -> dict[str, Any]:
    """Train a study; return its times, from the files that its packs write, and its metrics."""
    began = time.perf_counter()
    result = run_study(spec, out, remote=cluster and Packs(cluster))
    wall = time.perf_counter() - began
    first = min(path.stat().st_mtime_ns for path in out.rglob("spec.toml"))
    last = max(path.stat().st_mtime_ns for path in out.rglob("seed-*/manifest.json"))
    packs = [run.seconds for run in result.study.runs]
    logs = {run.parent.parent.name: run.read_text() for run in out.rglob("metrics.jsonl")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in logs.items()}
    metrics = {name: [(r["loss"], r["train_loss"]) for r in own] for name, own in rows.items()}
    return {
        "wall_seconds": wall, "seconds": (last - first) / 1e9, "metrics": metrics,
        "pack_seconds": statistics.median(packs),
    }  # fmt: skip


def start(cluster: Cluster, workers: int, device: str) -> None:
    """Start every worker: none goes on before all have imported the package."""

    def arrive(folder: str, number: int) -> None:
        import fedzmg.cluster.worker  # noqa: F401

        Path(folder, str(os.getpid())).touch()
        while len(os.listdir(folder)) < number:
            time.sleep(0.01)

    with tempfile.TemporaryDirectory() as folder:
        made = cluster.remote(arrive, cluster.needs(device))
        cluster.ray.get([made.remote(folder, workers) for _ in range(workers)])


def measured(workers: int, spec: StudySpec, out: Path) -> dict[str, Any]:
    """Train a study on workers of this machine."""
    began = time.perf_counter()
    with connected(f"ray:{workers}") as cluster:
        start(cluster, workers, spec.device)
        started = time.perf_counter() - began
        return {"workers": workers, "start_seconds": started, **train(spec, out, cluster)}


def scaling(seconds: float, packs: int, most: int, folder: Path) -> list[dict[str, Any]]:
    """Train equal packs with 1, 2, 4, ... workers."""
    few, many = (train(study(["fedavg"], n, "cpu"), folder / f"{n}") for n in (10, 60))
    each = (many["pack_seconds"] - few["pack_seconds"]) / 50
    names = {f"a{i}": {"algorithm": "fedavg"} for i in range(packs)}
    spec = study(names, max(10, round(seconds / each)), "cpu")
    print(f"{packs} packs of {spec.rounds} rounds\n")
    print("workers  start s  training s  efficiency  pack s  busy  outside of packs s")
    rows: list[dict[str, Any]] = []
    for workers in (2**i for i in range(most.bit_length())):
        row = measured(workers, spec, folder / f"workers-{workers}")
        del row["metrics"]
        rows.append({**row, "packs": packs})
        row = rows[-1]
        row["efficiency"] = rows[0]["seconds"] / workers / row["seconds"]
        row["busy"] = packs * row["pack_seconds"] / workers / row["seconds"]
        print(
            f"{workers:7} {row['start_seconds']:8.1f} {row['seconds']:11.1f} "
            f"{row['efficiency']:11.3f} {row['pack_seconds']:7.2f} {row['busy']:5.2f} "
            f"{row['wall_seconds'] - row['seconds']:19.1f}",
            flush=True,
        )
    return rows


def shared_gpu(rounds: int, folder: Path) -> dict[str, Any]:
    """Train a study on one GPU, in this process and with two workers that share it."""
    spec = study(ALGORITHMS, rounds, "cuda")
    local, shared = train(spec, folder / "local"), measured(2, spec, folder / "shared")
    own, other = (
        [value for name in ALGORITHMS for pair in found.pop("metrics")[name] for value in pair]
        for found in (local, shared)
    )
    differ = [abs(a - b) for a, b in zip(own, other, strict=True) if a != b]
    found = {"local": local, "shared": shared, "values": len(own), "differ": len(differ)}
    print(f"\n{len(ALGORITHMS)} packs of {rounds} rounds on {torch.cuda.get_device_name()}\n")
    print("           start s  training s  pack s")
    for name, row in (("local", local), ("2 workers", shared)):
        started = f"{row.get('start_seconds', 0.0):8.1f}"
        print(f"{name:9} {started} {row['seconds']:11.1f} {row['pack_seconds']:7.2f}")
    print(f"{len(differ)} of {len(own)} losses differ, at most by {max(differ, default=0.0):.3g}")
    return found


def model(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the wall time of many packs on large clusters."""
    print(f"\n{MANY_PACKS} packs of 10 min\n\nGPUs  wall min  busy")
    found, start = [], max(row["start_seconds"] for row in rows)
    between = max(0.0, rows[0]["seconds"] / rows[0]["packs"] - rows[0]["pack_seconds"])
    for gpus in GPUS:
        wall = wall_seconds([PACK_SECONDS] * MANY_PACKS, gpus, start, between)
        found.append({"gpus": gpus, "wall_seconds": wall})
        busy = MANY_PACKS * PACK_SECONDS / wall / gpus
        print(f"{gpus:4} {wall / 60:9.0f} {busy:5.2f}")
    return found


class Clock(Silent):
    """Records the end of every round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def advance(self, report: RoundReport) -> None:
        self.ends.append(time.perf_counter())


def one_run(workers: int, folder: Path) -> dict[str, Any]:
    """Train 10,000 clients a round in 8 shards; return the time of a round and peak memory."""
    plugins.load(__file__)
    spec = RunSpec(
        task=POPULATION, algorithm="fedavg", shards=8, engine="vectorized", device="cpu",
        protocol={"rounds": 5, "eval_every": 5},
    )  # fmt: skip
    task, clock = spec.build_task(), Clock()
    with connected(f"ray:{workers}") as cluster:
        history = train_run(cluster, task, spec.resolve(task), folder, clock)
        children = psutil.Process().children(recursive=True)
        others = sum(child.memory_info().rss for child in children) / 2**20
    row = {
        "workers": workers, "round_seconds": float(np.median(np.diff(clock.ends)[:-1])),
        "driver_mib": host_peak_mib(), "others_mib": others, "metric": history.records[-1].metric,
    }  # fmt: skip
    print(
        f"one run, {workers} workers: {row['round_seconds']:.2f} s per round of 10,000 "
        f"of {CLIENTS:,} clients, {row['driver_mib']:,.0f} MiB in the driver, "
        f"{others:,.0f} MiB in all other processes",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="Time of a pack.")
    parser.add_argument("--packs", type=int, default=16, help="Number of equal packs.")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="At most.")
    parser.add_argument("--gpu-rounds", type=int, default=400, help="Rounds of a pack on the GPU.")
    parser.add_argument("--population", action="store_true", help="Also one run in shards.")
    parser.add_argument("--out", type=Path, help="JSON file for the figures.")
    arguments = parser.parse_args()
    facts = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found: dict[str, Any] = {"environment": facts}
    facts["command"] = " ".join(["python", *sys.argv])
    with tempfile.TemporaryDirectory(prefix="fz-") as made:
        folder = Path(made)
        parts: dict[str, Callable[[], Any]] = {
            "packs": lambda: scaling(arguments.seconds, arguments.packs, arguments.workers, folder),
            "model": lambda: model(found["packs"]),
        }
        if torch.cuda.is_available():
            parts["shared_gpu"] = lambda: shared_gpu(arguments.gpu_rounds, folder / "gpu")
        if arguments.population:
            parts["run"] = lambda: [one_run(n, folder / f"run-{n}") for n in (1, 2)]
        for name, measure in parts.items():
            found[name] = measure()
            if arguments.out:
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
