"""Choose learning rates for an embedded task by a small grid, on the tuning half of its test data.

    python tools/tune.py digits --algorithms fedzmg fedavg fedadam

Every pair trains on seed 1000, which no reported run uses; the score is the mean metric of the
last evaluations. Writes results/tuning/TASK.json, from which the presets' options are taken.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedzmg import tasks
from fedzmg.simulation import Trial, simulate

SEED = 1000
RATES = [float(f"{10 ** (i / 2):.4g}") for i in range(-6, 3)]
"""The paper's grid: half decades from 1e-3 to 10."""
ADAPTIVE_SERVERS = ("adam", "yogi", "adagrad", "adadb")


def main() -> None:
    """Run the grids and keep every score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(tasks.TASKS))
    parser.add_argument("--algorithms", nargs="+", required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--last", type=int, default=5, help="evaluations that are averaged")
    arguments = parser.parse_args()

    task = tasks.get(arguments.task)
    tuning = replace(task, test=task.tune or task.test)
    path = Path("results/tuning") / f"{task.name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.algorithms:
        servers = RATES[1:6] if name.split(":")[0].endswith(ADAPTIVE_SERVERS) else RATES[3:8]
        pairs = [(c, s) for c in RATES[2:8] for s in servers]
        trials = [Trial.of(name, SEED, client_lr=c, server_lr=s) for c, s in pairs]
        histories = simulate(tuning, trials, rounds=arguments.rounds, engine="vectorized")
        scores = [float(np.mean(h.metrics[-arguments.last :])) for h in histories]
        best = int(np.argmax(scores))
        kept[name] = {
            "best": {"client.lr": pairs[best][0], "server.lr": pairs[best][1]},
            "score": round(scores[best], 4),
            "seed": SEED,
            "rounds": arguments.rounds or task.protocol.rounds,
            "grid": [[c, s, round(score, 4)] for (c, s), score in zip(pairs, scores, strict=True)],
        }
        print(name, kept[name]["best"], kept[name]["score"], flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
