"""Accuracy results printed in the FedZMG paper, for comparison with our own.

These are all numbers of its result tables. It prints no final accuracies and no chosen learning
rates. Percentages are fractions here. Its rounds count from 0: its index 80 is our round 81. The
paper's heterogeneity table is in :data:`fedzmg.data.heterogeneity.PAPER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedzmg.data.heterogeneity import PAPER


class PrintedScores(NamedTuple):
    """Scores of one algorithm in a table of the paper."""

    to_low: int
    """Index of the round at which 20 % was reached."""
    to_high: int
    """Index of the round at which 33 % was reached."""
    late: float
    """Mean accuracy after the slowest algorithm had reached 33 %."""


class PrintedTest(NamedTuple):
    """A paired t-test over five runs, FedZMG minus another algorithm."""

    t: float
    p: float


class Dataset(NamedTuple):
    """Everything printed about one data set."""

    title: str
    lines: dict[str, PrintedScores]
    tests: dict[str, PrintedTest]
    text_thresholds: tuple[float, float]
    """The text names these targets; the tables have ``THRESHOLDS`` for all data sets."""
    described: str
    """Entry of :data:`fedzmg.data.heterogeneity.PAPER`."""


class Counterpart(NamedTuple):
    """The paper's data set for a task."""

    dataset: Dataset
    stands_in: bool
    """True if the task has other data in the same layout."""


THRESHOLDS = (0.20, 0.33)
TESTED = "fedzmg"
"""The algorithm that the paper tests against the others."""
SEEDS = 5
PROTOCOL = {"rounds": 1000, "cohort": 10, "epochs": 4}
"""Settings of the paper that a study's protocol is compared with."""

_PRINTED = {
    # title, text thresholds; scores of fedzmg, fedavg and fedadam; tests of fedavg and fedadam
    "emnist62": (
        "EMNIST", (0.75, 0.85), [(15, 20, 0.9891), (15, 20, 0.9843), (35, 40, 0.9796)],
        [(4.025, 1.579e-2), (2.043, 1.105e-1)],
    ),
    "cifar100": (
        "CIFAR-100", (0.20, 0.33), [(95, 250, 0.3950), (155, 805, 0.3469), (135, 420, 0.3768)],
        [(20.716, 3.208e-5), (7.804, 1.455e-3)],
    ),
    "shakespeare": (
        "Shakespeare", (0.35, 0.45), [(15, 15, 0.5579), (15, 55, 0.5192), (30, 45, 0.5662)],
        [(3.854, 1.824e-2), (1.452, 2.201e-1)],
    ),
}  # fmt: skip
_NAMES = (TESTED, "fedavg", "fedadam")
_DATASETS = {
    key: Dataset(
        title,
        {name: PrintedScores(*own) for name, own in zip(_NAMES, scores, strict=True)},
        {name: PrintedTest(*own) for name, own in zip(_NAMES[1:], tests, strict=True)},
        thresholds,
        key,
    )
    for key, (title, thresholds, scores, tests) in _PRINTED.items()
}
_TWINS = {
    **{name: name for name in _PRINTED}, "emnist10": "emnist62", "emnist10-head62": "emnist62",
    "mnist-by-writer": "emnist62", "chars74k": "emnist62", "shakespeare-by-role": "shakespeare",
    "cifar100-tff": "cifar100", "plays": "shakespeare",
}  # fmt: skip
COUNTERPARTS = {
    name: Counterpart(
        _DATASETS[key], name in ("mnist-by-writer", "chars74k", "shakespeare-by-role")
    )
    for name, key in _TWINS.items()
    if name not in ("cifar100-tff", "plays")
}


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
    found = COUNTERPARTS.get(task)
    return f"{task} (stand-in for {found.dataset.title})" if found and found.stands_in else task
