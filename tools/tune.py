"""Choose default learning rates from kept searches, and search for the embedded tasks.

    python tools/tune.py digits --algorithms fedzmg fedavg fedadam
    python tools/tune.py plays --rounds 20 --algorithms fedzmg fedavg fedadam
    python tools/tune.py --adopt

A search trains every pair on the tuning half of the test data with the seeds 1000, 1001 and 1002,
which no reported run uses. Its score is the mean of the last evaluations; a diverged run counts 0.
Scores go to results/tuning/TASK.json. ``--adopt`` writes the best pairs of these and of the kept
grids to src/fedzmg/tasks/tuned.json, with a remark where a pair is doubtful.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from fedzmg import algorithms, tasks
from fedzmg.provenance import environment
from fedzmg.simulation import Device, Trial, resolve_device, simulate

ROOT = Path(__file__).parents[1]
ADOPTED = ROOT / "src/fedzmg/tasks/tuned.json"
SEEDS = (1000, 1001, 1002)
RATES = [float(f"{10 ** (i / 2):.4g}") for i in range(-6, 3)]
"""The paper's grid: half decades from 1e-3 to 10."""
ADAPTIVE_SERVERS = ("adam", "yogi", "adagrad", "adadb", "ams")
ADAPTIVE_CLIENTS = ("fedlion", "fedcada", "fedmuon", "fedgbo:adam", "fedgbo:rmsprop")
FIELD = [
    "local-gc",
    "global-gc",
    "gc-fed",
    "mimelite",
    "fedadam:reddi",
    "fedyogi:reddi",
    "fedadagrad:reddi",
    "fedadam:flower",
    "fedadadb",
    "fedprox:adaptive",
    "fedadap",
    "fedzmg-yogi",
    "fedzmg-adagrad",
]
"""Algorithms without a larger search on CIFAR-100."""
COMPARED = ("fedzmg", "fedavg", "fedadam", "fedavg:momentum", "fedzmg-adam")
"""The paper's comparison; its sixth, FedZMG without momentum, is a setting of FedZMG."""
GRIDS: dict[str, dict[str, dict[str, str]]] = {
    "cifar100": {
        "cifar100-halving-grid": {n: n for n in COMPARED},
        "ablation-hybrids-grid": {"fedzmg-adam:projected": "fedzmg-adam:projected"},
        "zero-mean-grid": {
            n: n
            for n in (
                "fedavgm",
                "fedprox",
                "fedyogi",
                "fedadagrad",
                "fedexp",
                "fedcm",
                "fedsam",
                "fedlc",
            )
        },
        "field-grid": {n: n for n in FIELD},
        "cifar100-named-grid": {n: n for n in ("scaffold", "fedcada")},
    },
    "mnist-by-writer": {"mnist-by-writer-halving-grid": {n: n for n in COMPARED}},
    "shakespeare-by-role": {
        "shakespeare-by-role-halving-grid": {n: n for n in ("fedzmg", "fedavg", "fedadam")},
        "shakespeare-by-role-momentum-grid": {"fedavg:momentum": "fedavg:momentum"},
        "shakespeare-by-role-others-grid": {"fedzmg-adam": "fedzmg-adam"},
    },
    "chars74k": {"chars74k-halving-grid": {n: n for n in COMPARED}},
}
"""Kept grids on a preset's own task and protocol: by algorithm, its row in the grid."""
STUDIES = {
    "cifar100": "cifar100-study",
    "mnist-by-writer": "mnist-by-writer-halving-study",
}
"""Longer runs with the pairs that the grids chose."""


def grid(name: str) -> list[dict[str, float]]:
    """List the learning rates to try; an algorithm without a server rate has one axis."""
    family = name.split(":")[0]
    small = name in ADAPTIVE_CLIENTS or family in ADAPTIVE_CLIENTS
    clients = [float(f"{r / 10:.4g}") for r in RATES] if small else RATES[1:]
    servers = RATES[:8] if family.endswith(ADAPTIVE_SERVERS) else RATES[1:]
    if "server.lr" not in algorithms.get(name).options():
        return [{"client.lr": c} for c in clients]
    return [{"client.lr": c, "server.lr": s} for c in clients for s in servers]


def search(name: str, tuning: tasks.Task, rounds: int | None, last: int, device: Device) -> Any:
    """Train every pair of one algorithm's grid and score it."""
    pairs = grid(name)
    trials = [Trial(algorithms.get(name).with_options(p), seed) for p in pairs for seed in SEEDS]
    histories = simulate(tuning, trials, rounds=rounds, engine="vectorized", device=device)
    runs = [0.0 if h.diverged is not None else float(np.mean(h.metrics[-last:])) for h in histories]
    scores = np.reshape(runs, (len(pairs), len(SEEDS))).mean(axis=1).tolist()
    best = int(np.argmax(scores))
    facts = environment(resolve_device(device))
    return {
        "best": pairs[best],
        "score": round(scores[best], 4),
        "seeds": list(SEEDS),
        "rounds": rounds or tuning.protocol.rounds,
        "machine": f"{facts['machine']}, torch {torch.__version__.split('+')[0]}",
        "commit": facts["commit"],
        "dirty": facts["dirty"],
        "command": shlex.join(["python", *sys.argv]),
        "grid": [[*p.values(), round(s, 4)] for p, s in zip(pairs, scores, strict=True)],
    }


def border(best: Mapping[str, float], tried: Mapping[str, Sequence[float]]) -> str:
    """Name the learning rates at an end of the range that was tried."""
    ends = [key for key, values in tried.items() if best[key] in (min(values), max(values))]
    return f"best pair on the border of the search ({', '.join(ends)})" if ends else ""


def broken(study: Mapping[str, Any], name: str) -> str:
    """Count the runs of a study that ended below half of its best run."""
    runs = {key: row["final"]["full"]["runs"] for key, row in study["algorithms"].items()}
    level = max(max(scores) for scores in runs.values()) / 2
    low = sum(score < level for score in runs.get(name, []))
    if not low:
        return ""
    return f"{low} of {len(runs[name])} runs of {study['rounds']} rounds broke down"


def kept_tunings() -> dict[str, dict[str, Any]]:
    """Collect the best pairs of every kept search, by task and algorithm."""
    out: dict[str, dict[str, Any]] = {}
    for path in sorted((ROOT / "results/tuning").glob("*.json")):
        out[path.stem] = {}
        for name, found in json.loads(path.read_text()).items():
            columns = list(zip(*found["grid"], strict=True))
            remark = border(found["best"], dict(zip(found["best"], columns, strict=False)))
            out[path.stem][name] = _row(found["best"], path, remark)
    for task, grids in GRIDS.items():
        longer = STUDIES.get(task)
        study = json.loads((ROOT / "results" / longer / "study.json").read_text()) if longer else {}
        out[task] = {}
        for directory, names in grids.items():
            path = ROOT / "results" / directory
            rows = json.loads((path / "grid.json").read_text())["algorithms"]
            for name, key in names.items():
                best = rows[key]["best"]["options"]
                remarks = [border(best, rows[key]["axes"]), broken(study, name) if study else ""]
                out[task][name] = _row(best, path, "; ".join(filter(None, remarks)))
    return out


def _row(options: Mapping[str, float], path: Path, remark: str) -> dict[str, Any]:
    row = {"options": options, "source": path.relative_to(ROOT).as_posix()}
    return row | ({"remark": remark} if remark else {})


def main() -> None:
    """Run searches, or adopt their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="?", choices=sorted(tasks.TASKS))
    known = [name for name in algorithms.ALGORITHMS if name != "fedbn"]  # no task has BatchNorm
    parser.add_argument("--algorithms", nargs="+", default=known)
    parser.add_argument("--device", default="auto", choices=get_args(Device))
    parser.add_argument("--out", type=Path, default=ROOT / "results/tuning")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--adopt", action="store_true", help="write the defaults of all tasks")
    parser.add_argument("--last", type=int, default=5, help="evaluations that are averaged")
    arguments = parser.parse_args()
    if arguments.task:
        task = tasks.get(arguments.task)
        if not task.metric.higher_is_better:
            raise SystemExit(f"tune.py: {task.name}: lower {task.metric.name} is better; "
                             "use 'fedzmg grid'")  # fmt: skip
        tuning = replace(task, test=task.tune or task.test, test_owners=None)
        path = arguments.out / f"{task.name}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        for name in arguments.algorithms:
            kept[name] = search(name, tuning, arguments.rounds, arguments.last, arguments.device)
            print(name, kept[name]["best"], kept[name]["score"], flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.adopt:
        ADOPTED.write_text(json.dumps(kept_tunings(), indent=1) + "\n")


if __name__ == "__main__":
    main()
