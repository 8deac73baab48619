"""Choose learning rates for an embedded task by a small grid, on the tuning half of its test data.

    python tools/tune.py digits --algorithms fedzmg fedavg fedadam

Every pair trains on the seeds 1000, 1001 and 1002, which no reported run uses; the score is the
mean over them of the last evaluations' metric, a diverged run counting 0, so that a pair which
survives by luck does not win. Writes results/tuning/TASK.json; ``--adopt`` makes the best pairs
the defaults.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np

from fedzmg import algorithms, tasks
from fedzmg.simulation import Device, Trial, simulate

SEEDS = (1000, 1001, 1002)
ADOPTED = Path(__file__).parents[1] / "src/fedzmg/tasks/tuned.json"
RATES = [float(f"{10 ** (i / 2):.4g}") for i in range(-6, 3)]
"""The paper's grid: half decades from 1e-3 to 10."""
ADAPTIVE_SERVERS = ("adam", "yogi", "adagrad", "adadb")
ADAPTIVE_CLIENTS = ("fedlion", "fedcada", "fedgbo:adam", "fedgbo:rmsprop")


def grid(name: str) -> list[dict[str, float]]:
    """Client and server rates to try; an algorithm without a server rate has one axis."""
    family = name.split(":")[0]
    small = name in ADAPTIVE_CLIENTS or family in ADAPTIVE_CLIENTS
    clients = [float(f"{r / 10:.4g}") for r in RATES] if small else RATES[1:]
    servers = RATES[:8] if family.endswith(ADAPTIVE_SERVERS) else RATES[1:]
    keys = algorithms.get(name).options()
    if "server.lr" not in keys:
        return [{"client.lr": c} for c in clients]
    return [{"client.lr": c, "server.lr": s} for c in clients for s in servers]


def main() -> None:
    """Run the grids and keep every score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(tasks.TASKS))
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms.ALGORITHMS))
    parser.add_argument("--device", default="auto", choices=get_args(Device))
    parser.add_argument("--out", type=Path, default=Path("results/tuning"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--adopt", action="store_true", help="make the best the task's defaults")
    parser.add_argument("--last", type=int, default=5, help="evaluations that are averaged")
    arguments = parser.parse_args()

    task = tasks.get(arguments.task)
    if not task.metric.higher_is_better:
        raise SystemExit(
            f"tune.py: task {task.name!r} is judged by {task.metric.name}, where less is better, "
            "and this looks for the highest score: choose its rates by fedzmg grid"
        )
    tuning = replace(task, test=task.tune or task.test)
    path = arguments.out / f"{task.name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.algorithms:
        pairs = grid(name)
        trials = [
            Trial(algorithms.get(name).with_options(pair), seed) for pair in pairs for seed in SEEDS
        ]
        histories = simulate(
            tuning, trials, rounds=arguments.rounds, engine="vectorized", device=arguments.device
        )
        runs = [
            0.0 if h.diverged is not None else float(np.mean(h.metrics[-arguments.last :]))
            for h in histories
        ]
        scores = np.reshape(runs, (len(pairs), len(SEEDS))).mean(axis=1).tolist()
        best = int(np.argmax(scores))
        kept[name] = {
            "best": pairs[best],
            "score": round(scores[best], 4),
            "seeds": list(SEEDS),
            "rounds": arguments.rounds or task.protocol.rounds,
            "grid": [
                [*pair.values(), round(score, 4)] for pair, score in zip(pairs, scores, strict=True)
            ],
        }
        print(name, kept[name]["best"], kept[name]["score"], flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.adopt:
        adopted = json.loads(ADOPTED.read_text())
        adopted[task.name] = {name: found["best"] for name, found in kept.items()}
        ADOPTED.write_text(json.dumps(adopted, indent=1) + "\n")


if __name__ == "__main__":
    main()
