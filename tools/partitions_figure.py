"""Draw what the projection gains on partitions of different heterogeneity, and check predictions.

    python tools/partitions_figure.py

Reads results/cifar100-heterogeneity-NAME of every partition that is there, trains nothing, and
writes results/cifar100-heterogeneity-iid/gains.png and gains.svg. Prints final accuracies, gains by
seed in pairs that differ by the projection, and whether results/predictions/predictions.json was
right about the gain over FedAvg with momentum.
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
POINT, ERRORS = 1.0, 2.0  # a gain or a loss is at least so many points and standard errors


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def runs_of(name: str) -> dict[str, list[float]]:
    """Return the final accuracies in percent of a partition's study, by directory."""
    study = RESULTS / f"cifar100-heterogeneity-{name}" / "study.json"
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


def main() -> None:
    """Draw, write and print."""
    found = {name: runs for name in PARTITIONS if (runs := runs_of(name))}
    for path in save(draw(found), RESULTS / "cifar100-heterogeneity-iid" / "gains"):
        print(path.relative_to(RESULTS.parent))
    for name, runs in found.items():
        finals = ", ".join(f"{algorithm} {mean(own):.2f}" for algorithm, own in runs.items())
        print(f"\n{PARTITIONS[name][0]}: {finals}")
        for title, pair in PAIRS.items():
            points = gains(runs, pair)
            each = ", ".join(f"{value:+.2f}" for value in points)
            print(f"  projection, {title}: {mean(points):+.2f} ({each} by seed)")
    predictions = read(RESULTS / "predictions" / "predictions.json")["predictions"]
    known = [(p, gains(found[p["name"]], PAIRS["with momentum and decay"]))
             for p in predictions if p["name"] in found]  # fmt: skip
    hits = sum(p["expect"] == outcome(points) for p, points in known)
    print(f"\npredictions: {hits} of {len(known)} right, {len(predictions) - len(known)} to be run")
    for p, points in known:
        print(f"  {p['name']}: expected {p['expect']} ({p['ratio']:.2f} times as far), "
              f"outcome {outcome(points)} ({mean(points):+.2f} points)")  # fmt: skip


if __name__ == "__main__":
    main()
