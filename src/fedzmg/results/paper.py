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

_EMNIST = Dataset(
    "EMNIST",
    {
        "fedzmg": PrintedScores(15, 20, 0.9891),
        "fedavg": PrintedScores(15, 20, 0.9843),
        "fedadam": PrintedScores(35, 40, 0.9796),
    },
    {"fedadam": PrintedTest(2.043, 1.105e-1), "fedavg": PrintedTest(4.025, 1.579e-2)},
    (0.75, 0.85),
    "emnist62",
)
_CIFAR100 = Dataset(
    "CIFAR-100",
    {
        "fedzmg": PrintedScores(95, 250, 0.3950),
        "fedavg": PrintedScores(155, 805, 0.3469),
        "fedadam": PrintedScores(135, 420, 0.3768),
    },
    {"fedadam": PrintedTest(7.804, 1.455e-3), "fedavg": PrintedTest(20.716, 3.208e-5)},
    (0.20, 0.33),
    "cifar100",
)
_SHAKESPEARE = Dataset(
    "Shakespeare",
    {
        "fedzmg": PrintedScores(15, 15, 0.5579),
        "fedavg": PrintedScores(15, 55, 0.5192),
        "fedadam": PrintedScores(30, 45, 0.5662),
    },
    {"fedadam": PrintedTest(1.452, 2.201e-1), "fedavg": PrintedTest(3.854, 1.824e-2)},
    (0.35, 0.45),
    "shakespeare",
)

COUNTERPARTS = {
    "emnist62": Counterpart(_EMNIST, False),
    "emnist10": Counterpart(_EMNIST, False),
    "emnist10-head62": Counterpart(_EMNIST, False),
    "cifar100": Counterpart(_CIFAR100, False),
    "shakespeare": Counterpart(_SHAKESPEARE, False),
    "mnist-by-writer": Counterpart(_EMNIST, True),
    "chars74k": Counterpart(_EMNIST, True),
    "shakespeare-by-role": Counterpart(_SHAKESPEARE, True),
}
_DESCRIBED = {name: one.dataset.described for name, one in COUNTERPARTS.items()}
_DESCRIBED |= {"cifar100-tff": "cifar100", "plays": "shakespeare"}


def twin(name: str) -> str | None:
    """Return the key of the paper's heterogeneity column for a data set, if there is one."""
    return _DESCRIBED.get(name)


def described(name: str) -> Mapping[str, Any] | None:
    """Return that column; None if the paper has nothing like the data set."""
    found = twin(name)
    return None if found is None else PAPER[found]


def shown(task: str) -> str:
    """Return the display name of a task; a stand-in always says so.

    >>> shown("cifar100"), shown("mnist-by-writer")
    ('cifar100', 'mnist-by-writer (stand-in for EMNIST)')
    """
    twin = COUNTERPARTS.get(task)
    if twin is None or not twin.stands_in:
        return task
    return f"{task} (stand-in for {twin.dataset.title})"
