"""Accuracy results printed in the FedZMG paper, for comparison with our own.

These are all numbers of its result tables. It prints no final accuracies and no chosen learning
rates. Percentages are fractions here. Its rounds count from 0: its index 80 is our round 81. The
paper's heterogeneity table is in :data:`fedzmg.data.heterogeneity.PAPER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedzmg.data.heterogeneity import PAPER

THRESHOLDS = (0.20, 0.33)
TESTED = "fedzmg"
"""The algorithm that the paper tests against the others."""
SEEDS = 5
PROTOCOL = {"rounds": 1000, "cohort": 10, "epochs": 4}
"""Settings of the paper that a study's protocol is compared with."""
STAND_INS = ("mnist-by-writer", "chars74k", "shakespeare-by-role")
"""Tasks with other data in the layout of the paper's."""


class Dataset(NamedTuple):
    """Everything printed about one data set."""

    title: str
    scores: Mapping[str, tuple[int, int, float]]
    """By algorithm: index of the round at each threshold, and the mean accuracy after the slowest
    algorithm had reached the higher one."""
    tests: Mapping[str, tuple[float, float]]
    """t and p of paired t-tests over five runs, FedZMG minus another algorithm."""


_DATASETS = {
    "emnist62": Dataset(
        "EMNIST",
        {"fedzmg": (15, 20, 0.9891), "fedavg": (15, 20, 0.9843), "fedadam": (35, 40, 0.9796)},
        {"fedavg": (4.025, 1.579e-2), "fedadam": (2.043, 1.105e-1)},
    ),
    "cifar100": Dataset(
        "CIFAR-100",
        {"fedzmg": (95, 250, 0.3950), "fedavg": (155, 805, 0.3469), "fedadam": (135, 420, 0.3768)},
        {"fedavg": (20.716, 3.208e-5), "fedadam": (7.804, 1.455e-3)},
    ),
    "shakespeare": Dataset(
        "Shakespeare",
        {"fedzmg": (15, 15, 0.5579), "fedavg": (15, 55, 0.5192), "fedadam": (30, 45, 0.5662)},
        {"fedavg": (3.854, 1.824e-2), "fedadam": (1.452, 2.201e-1)},
    ),
}  # fmt: skip
_TASKS = {
    **{name: name for name in _DATASETS}, "emnist10": "emnist62", "emnist10-head62": "emnist62",
    "mnist-by-writer": "emnist62", "chars74k": "emnist62", "shakespeare-by-role": "shakespeare",
}  # fmt: skip
_TWINS = {**_TASKS, "cifar100-tff": "cifar100", "plays": "shakespeare"}
COUNTERPARTS = {task: _DATASETS[name] for task, name in _TASKS.items()}
"""The paper's data set by task."""


def twin(name: str) -> str | None:
    """Return the key of the paper's heterogeneity column for a data set, if there is one."""
    return _TWINS.get(name)


def described(name: str) -> Mapping[str, Any] | None:
    """Return that column; None if the paper has nothing like the data set."""
    return PAPER.get(_TWINS.get(name, ""))


def shown(task: str) -> str:
    """Return the display name of a task; a stand-in always says so.

    >>> shown("cifar100"), shown("mnist-by-writer")
    ('cifar100', 'mnist-by-writer (stand-in for EMNIST)')
    """
    return f"{task} (stand-in for {COUNTERPARTS[task].title})" if task in STAND_INS else task
