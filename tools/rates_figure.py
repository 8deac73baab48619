"""Draw final accuracy against the client learning rate, from a halving search and its study.

    python tools/rates_figure.py [cifar100]

Reads results/TASK-halving-grid and results/TASK-halving-study, trains nothing, and writes
results/TASK-halving-study/rates.png and rates.svg. Prints what the projection gains, by seed.

A line joins, for each client learning rate, the best server learning rate among the pairs that the
search trained to the end (dots: its two seeds). Rates without such a pair were dropped earlier or
diverged. The large marker is the chosen pair on the study's fresh seeds (dots beside it). A ring is
the pair that the first 50 rounds would have chosen, at the accuracy that it has at the end. Ticks
on the right: late stage in the paper.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from fedzmg.report.figures.style import COLOURS, INK, QUIET_INK, Chart, save, styled, use_log_scale

RESULTS = Path(__file__).resolve().parents[1] / "results"
NAMES = {
    "fedzmg-adam": "FedZMG-Adam",
    "fedzmg": "FedZMG",
    "fedzmg-without-momentum": "FedZMG without momentum",
    "fedadam": "FedAdam",
    "fedavg:momentum": "FedAvg, momentum and decay",
    "fedavg": "FedAvg",
}
SHAPES = dict(zip(NAMES, "D*Pos^", strict=True))
SIZES = {"*": 15, "P": 10}
PRINTED = {"cifar100": {"fedzmg": 0.3950, "fedadam": 0.3768, "fedavg": 0.3469}}
"""The paper's accuracy in the late stage."""
PAIRS = [
    ("fedzmg-without-momentum", "fedavg"), ("fedzmg", "fedavg-momentum"),
    ("fedzmg-adam", "fedadam"), ("fedavg-momentum", "fedavg"),
]  # fmt: skip
"""Pairs that differ by the projection alone (FedAdam also lacks momentum), and by momentum."""
TITLES = {
    "cifar100": "Chosen by the whole horizon, FedZMG ends above FedAdam; by 50 rounds, below it"
}


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def early_choices(task: str) -> dict[str, Any]:
    """Return the pairs that the paper's search chose after 50 rounds, by algorithm."""
    grids = (read(RESULTS / f"{task}-{kind}" / "grid.json") for kind in ("grid", "momentum-grid"))
    entries = [item for grid in grids for item in grid["algorithms"].items()]
    return {name: entry["best"]["options"] for name, entry in entries}


@styled
def draw(task: str) -> Chart:
    """Draw the figure of a task."""
    grid, study = (RESULTS / f"{task}-halving-{kind}" for kind in ("grid", "study"))
    entries = read(study / "study.json")["algorithms"].values()
    fresh = {entry["directory"]: entry for entry in entries}
    chart = Chart(TITLES.get(task, task), size=(7.2, 4.6))
    axes = chart.panel("client learning rate", "final accuracy", "accuracy")
    use_log_scale(axes, "x")
    handles, chosen = [], early_choices(task)
    for position, (name, label) in enumerate(NAMES.items()):
        colour, shape = COLOURS[position], SHAPES[name]
        folder = name.replace(":", "-")
        scores = read(grid / folder / "scores.json")
        ended = [point for point in scores["points"] if point["score"] is not None]
        best: dict[float, dict[str, Any]] = {}
        for point in sorted(ended, key=lambda one: one["score"]):
            best[point["options"]["client.lr"]] = point
        rates = sorted(best)
        axes.plot(rates, [best[rate]["score"] for rate in rates], color=colour, linewidth=1.4)
        for rate in rates:
            runs = best[rate]["runs"]
            axes.plot([rate] * len(runs), runs, ".", color=colour, markersize=4, alpha=0.7)
        runs = fresh[folder]["final"]["full"]["runs"]
        rate = fresh[folder]["options"]["client.lr"] * 1.06
        axes.plot([rate] * len(runs), runs, ".", color=colour, markersize=4)
        mean = sum(runs) / len(runs)
        axes.plot(
            [rate],
            [mean],
            shape,
            color=colour,
            markersize=SIZES.get(shape, 9),
            markeredgecolor="white",
        )
        handles.append(Line2D([], [], color=colour, marker=shape, markersize=7, label=label))
        for early in (point for point in ended if point["options"] == chosen[name]):
            axes.plot(
                [early["options"]["client.lr"]], [early["score"]], "o", markersize=13,
                color=colour, markerfacecolor="none", markeredgewidth=1.2,
            )  # fmt: skip
        if name in PRINTED.get(task, {}):
            value = PRINTED[task][name]
            axes.plot(
                [1.0], [value], marker=0, markersize=10, color=colour, clip_on=False,
                transform=axes.get_yaxis_transform(),
            )  # fmt: skip
    ring = Line2D(
        [], [], linestyle="", marker="o", markersize=10, color=INK, markerfacecolor="none"
    )
    handles, names = [*handles, ring], [*NAMES.values(), "chosen after 50 rounds"]
    if task in PRINTED:
        handles.append(Line2D([], [], linestyle="", marker="_", markersize=10, color=QUIET_INK))
        names.append("the paper's late stage")
    chart.name_series(handles, names, below=True)
    return chart


def main() -> None:
    """Draw and write."""
    task = sys.argv[1] if len(sys.argv) > 1 else "cifar100"
    study = RESULTS / f"{task}-halving-study"
    for path in save(draw(task), study / "rates"):
        print(path.relative_to(RESULTS.parent))
    entries = read(study / "study.json")["algorithms"].values()
    runs = {entry["directory"]: entry["final"]["full"]["runs"] for entry in entries}
    for name, other in PAIRS:
        points = [100 * (a - b) for a, b in zip(runs[name], runs[other], strict=True)]
        each = f"{min(points):+.1f} to {max(points):+.1f} by seed"
        print(f"{name} minus {other}: {sum(points) / len(points):+.1f} points ({each})")


if __name__ == "__main__":
    main()
