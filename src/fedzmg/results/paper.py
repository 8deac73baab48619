"""Accuracy results printed in the FedZMG paper, for comparison with our own.

These are all numbers of its result tables. It prints no final accuracies and no chosen learning
rates. Percentages are fractions here. Its rounds count from 0: its index 80 is our round 81. The
paper's heterogeneity table is in :data:`fedzmg.data.heterogeneity.PAPER`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.data.heterogeneity import PAPER

THRESHOLDS = (0.20, 0.33)
TESTED = "fedzmg"  # the algorithm that the paper tests against the others
SEEDS = 5
PROTOCOL = {"rounds": 1000, "cohort": 10, "epochs": 4}  # compared with a study's protocol
STAND_INS = ("mnist-by-writer", "chars74k", "shakespeare-by-role")  # other data, same layout


class Dataset(NamedTuple):
    """Everything printed about one data set."""

    title: str
    scores: Mapping[str, Sequence[float]]
    """By algorithm: index of the round at each threshold, and the mean accuracy after the slowest
    algorithm had reached the higher one."""
    tests: Mapping[str, Sequence[float]]  # t and p, paired over five runs: FedZMG minus another


_TABLE = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
_DATASETS = {name: Dataset(**entry) for name, entry in json.loads(_TABLE).items()}
_TASKS = {
    **{name: name for name in _DATASETS}, "emnist10": "emnist62", "emnist10-head62": "emnist62",
    "mnist-by-writer": "emnist62", "chars74k": "emnist62", "shakespeare-by-role": "shakespeare",
}  # fmt: skip
TWINS = {**_TASKS, "cifar100-tff": "cifar100", "plays": "shakespeare"}  # keys of PAPER
COUNTERPARTS = {task: _DATASETS[name] for task, name in _TASKS.items()}


def described(name: str) -> Mapping[str, Any] | None:
    """Return the paper's heterogeneity column; None if it has nothing like the data set."""
    return PAPER.get(TWINS.get(name, ""))


def shown(task: str) -> str:
    """Return the display name of a task; a stand-in always says so."""
    return f"{task} (stand-in for {COUNTERPARTS[task].title})" if task in STAND_INS else task
