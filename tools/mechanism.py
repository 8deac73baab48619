"""Print the share of the projection's gain that each set of projected layers keeps.

    python tools/mechanism.py
    python tools/mechanism.py cifar100-mechanism-centred

Reads a study in results, by default cifar100-mechanism, and trains nothing. Variants are compared
with ``none``, the one without momentum with ``none-without-momentum``; differences are in points of
final accuracy. A set of layers explains the gain if it keeps at least three quarters of it for
every seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
STUDIES = "cifar100-mechanism", "cifar100-mechanism-centred"
ENOUGH = 0.75
"""Share of the gain, fixed in experiments/cifar100-mechanism-study.toml before training."""
PLAIN = "-without-momentum"
PAIRS = {
    "first layer, others projected": ("all", "all-but-first"),
    "hidden dense layer, convolutions projected": ("all-but-last", "convolutions"),
    "classifier, others projected": ("all", "all-but-last"),
    "biases, all weights projected": ("all-and-biases", "all"),
    "momentum, all projected": ("all", "all" + PLAIN),
    "momentum, none projected": ("none", "none" + PLAIN),
    "rate 10^-2 instead of 10^-2.5, none projected": ("none", "fedavg-momentum"),
    "trained twice, all": ("all", "fedzmg"),
    "trained twice, all without momentum": ("all" + PLAIN, "fedzmg" + PLAIN),
}
"""Pairs that differ by one part, the last three with results/cifar100-heterogeneity-pachinko."""


def read(name: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Read a study and its final accuracies in percent, by directory."""
    study = json.loads((RESULTS / name / "study.json").read_text())
    entries = study["algorithms"].values()
    return study, {e["directory"]: [100 * x for x in e["final"]["full"]["runs"]] for e in entries}


def minus(one: list[float], other: list[float]) -> list[float]:
    """Subtract seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def by_seed(values: list[float], form: str) -> str:
    """Format the mean and every seed."""
    return f"{mean(values):{form}} ({', '.join(f'{value:{form}}' for value in values)})"


def main() -> None:
    """Print every variant, the verdict and the effect of single parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", nargs="?", default=STUDIES[0], choices=STUDIES)
    name = parser.parse_args().study
    study, finals = read(name)
    gain, explains = minus(finals["all"], finals["none"]), []
    rules = [threshold["rules"]["rolling_mean"] for threshold in study["thresholds"]]
    for variant, runs in finals.items():
        points = minus(runs, finals["none" + PLAIN * variant.endswith(PLAIN)])
        rounds = ", ".join(str(rule["arrival"][variant]["averaged"]) for rule in rules)
        shown = f"{variant}: {by_seed(runs, '.2f')}, sd {stdev(runs):.2f}"
        print(f"{shown}; rounds to thresholds: {rounds}")
        print(f"  minus none {by_seed(points, '+.2f')}")
        if not variant.endswith(PLAIN):
            shares = [each / whole for each, whole in zip(points, gain, strict=True)]
            print(f"  share of the gain {by_seed(shares, '.0%')}")
            explains += [variant] * (min(shares) >= ENOUGH)
    print(f"\nat least {ENOUGH:.0%} of the gain for every seed: {', '.join(explains)}")
    finals |= read("cifar100-heterogeneity-pachinko")[1] if name == STUDIES[0] else {}
    for part, (one, other) in PAIRS.items():
        if {one, other} <= finals.keys():
            print(f"  {part}: {by_seed(minus(finals[one], finals[other]), '+.2f')}")


if __name__ == "__main__":
    main()
