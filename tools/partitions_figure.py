"""Draw what the projection gains on partitions of different heterogeneity, and check predictions.

    python tools/partitions_figure.py

Reads results/cifar100-heterogeneity-NAME of every partition that is there and the studies of single
settings, trains nothing, and writes results/cifar100-heterogeneity-iid/gains.png and gains.svg.
Prints final accuracies, gains by seed in pairs that differ by the projection, and whether
results/predictions/predictions.json was right about the gain over FedAvg with momentum.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedzmg.report.figures.style import COLOURS, Chart, save, styled

RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTITIONS = {
    "iid": ("IID", 63.6),
    "dirichlet-1": ("Dirichlet 1", 50.4),
    "dirichlet-0.3": ("Dirichlet 0.3", 36.3),
    "dirichlet-0.1": ("Dirichlet 0.1", 22.1),
    "pachinko": ("Pachinko", 22.0),
}
"""Title and mean number of classes per client, of ``fedzmg data describe cifar100 --partition``."""
PAIRS = {
    "with momentum and decay": ("fedzmg", "fedavg-momentum"),
    "without momentum": ("fedzmg-without-momentum", "fedavg"),
    "with Adam on the server": ("fedzmg-adam", "fedadam"),
}
"""Pairs that differ by the projection, each at its own learning rates.

FedAvg and FedAdam also lack decay, FedAdam also momentum.
"""
MOMENTUM = PAIRS["with momentum and decay"]
OTHERS = {
    "dirichlet-0.1-seed-1": ("cifar100-partitions-1", MOMENTUM),
    "dirichlet-0.1-seed-2": ("cifar100-partitions-2", MOMENTUM),
    "centred": ("cifar100-mechanism-centred", ("all", "none")),
    "cnn-gn": ("cifar100-networks-cnn-gn", MOMENTUM),
    "resnet18-gn": ("cifar100-networks-resnet18-gn", MOMENTUM),
    "mnist-by-writer": ("mnist-by-writer-halving-study", MOMENTUM),
}
"""Results and pair of single settings, by the name of their prediction."""
LARGER = "cifar100-heterogeneity-rates-"
"""Results of FedAvg with momentum at client learning rate 10^-2, by partition."""
POINT, ERRORS = 1.0, 2.0  # a gain or a loss is at least so many points and standard errors


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def runs_of(name: str) -> dict[str, list[float]]:
    """Return the final accuracies in percent of a study that is there, by directory."""
    study = RESULTS / name / "study.json"
    entries = read(study)["algorithms"].values() if study.is_file() else ()
    return {e["directory"]: [100 * run for run in e["final"]["full"]["runs"]] for e in entries}


def gains(runs: dict[str, list[float]], pair: tuple[str, str]) -> list[float]:
    """Return the differences of a pair, by seed."""
    return [a - b for a, b in zip(*(runs[name] for name in pair), strict=True)]


def outcome(points: list[float]) -> str:
    """Name the outcome of a paired difference."""
    enough = max(POINT, ERRORS * stdev(points) / len(points) ** 0.5)
    return "gain" if mean(points) >= enough else "loss" if mean(points) <= -enough else "little"


@styled
def draw(found: dict[str, dict[str, list[float]]]) -> Chart:
    """Draw gains by partition: a line of means and a dot per seed."""
    chart = Chart("The projection gains no less on IID clients", size=(6.4, 4.0))
    axes = chart.panel("", "gain of the projection, points", "")
    handles = []
    for colour, shift, pair in zip(COLOURS, (-0.06, 0.0, 0.06), PAIRS.values(), strict=False):
        each = [gains(runs, pair) for runs in found.values()]
        handles += axes.plot(range(len(each)), [mean(points) for points in each], color=colour)
        for place, points in enumerate(each):
            axes.plot([place + shift] * len(points), points, ".", color=colour, markersize=6)
    axes.set_xticks(range(len(found)))
    labels = [f"{title}\n{classes:.0f} classes" for title, classes in map(PARTITIONS.get, found)]  # type: ignore[misc]
    axes.set_xticklabels(labels)
    axes.set_ylim(bottom=0)
    chart.name_series(handles, list(PAIRS), below=True)
    return chart


def shown(points: list[float]) -> str:
    """Format the mean and every seed."""
    return f"{mean(points):+.2f} ({', '.join(f'{value:+.2f}' for value in points)} by seed)"


def main() -> None:
    """Draw, write and print."""
    every = {name: runs_of(f"cifar100-heterogeneity-{name}") for name in PARTITIONS}
    found = {name: runs for name, runs in every.items() if runs}
    for path in save(draw(found), RESULTS / "cifar100-heterogeneity-iid" / "gains"):
        print(path.relative_to(RESULTS.parent))
    for name, runs in found.items():
        finals = ", ".join(f"{algorithm} {mean(own):.2f}" for algorithm, own in runs.items())
        print(f"\n{PARTITIONS[name][0]}: {finals}")
        for title, pair in PAIRS.items():
            print(f"  projection, {title}: {shown(gains(runs, pair))}")
        # Pachinko clients were trained at that rate in another study.
        own = "cifar100-mechanism" if name == "pachinko" else LARGER + name
        if larger := runs_of(own):
            again = larger.get("none") or larger[MOMENTUM[1]]
            points = [a - b for a, b in zip(runs[MOMENTUM[0]], again, strict=True)]
            print(f"  over FedAvg with momentum at 10^-2, {mean(again):.2f}: {shown(points)}")
    known = {name: gains(runs, MOMENTUM) for name, runs in found.items()}
    for name, (results, pair) in OTHERS.items():
        if runs := runs_of(results):
            known[name] = gains(runs, pair)
            finals = ", ".join(f"{one} {mean(runs[one]):.2f}" for one in pair)
            print(f"\n{name}: {finals}; {shown(known[name])}")
    predictions = read(RESULTS / "predictions" / "predictions.json")["predictions"]
    judged = [p for p in predictions if p["name"] in known]
    hits = sum(p["expect"] == outcome(known[p["name"]]) for p in judged)
    print(
        f"\npredictions: {hits} of {len(judged)} right, {len(predictions) - len(judged)} to be run"
    )
    for p in judged:
        points = known[p["name"]]
        print(f"  {p['name']}: expected {p['expect']} (ratio {p['ratio']:.2f}), "
              f"outcome {outcome(points)} ({mean(points):+.2f} points)")  # fmt: skip


if __name__ == "__main__":
    main()
