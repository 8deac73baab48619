"""WHAT is computed: one file per paper, and the table of every algorithm.

Adding an algorithm is one file and one row here; the conformance tests then cover it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedzmg.algorithms.fedadam import FEDADAM, FEDADAM_REDDI, Adam, ReddiAdam
from fedzmg.algorithms.fedavg import FEDAVG, Average
from fedzmg.algorithms.fedzmg import FEDZMG, FEDZMG_ADAM, ZeroMean, zero_mean
from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import Algorithm
from fedzmg.errors import unknown

__all__ = [
    "ALGORITHMS",
    "SGD",
    "Adam",
    "Average",
    "Entry",
    "ReddiAdam",
    "ZeroMean",
    "get",
    "zero_mean",
]


@dataclass(frozen=True)
class Entry:
    """One row of the table: the algorithm with its defaults and what a user wants to know first."""

    algorithm: Algorithm
    summary: str
    source: str
    down: int = 1
    """Models' worth of tensors that travel to each client of a cohort, every round."""
    up: int = 1
    """Models' worth of tensors that travel back."""


ALGORITHMS: dict[str, Entry] = {
    entry.algorithm.name: entry
    for entry in (
        Entry(
            FEDZMG,
            "zero-mean client gradients, momentum, decoupled decay; server average",
            "Zantalis, Zervas, Koulouras 2026",
        ),
        Entry(FEDAVG, "local SGD; server average", "McMahan et al. 2017"),
        Entry(
            FEDADAM,
            "local SGD; bias-corrected server Adam as in TFF (the paper's baseline)",
            "Reddi et al. 2020, TensorFlow Federated",
        ),
        Entry(
            FEDADAM_REDDI,
            "local SGD; server Adam as published, without bias correction",
            "Reddi et al. 2020",
        ),
        Entry(
            FEDZMG_ADAM,
            "FedZMG's clients with FedAdam's server",
            "named as future work by Zantalis et al. 2026",
        ),
    )
}


def get(name: str) -> Algorithm:
    """The algorithm of that name with its default hyper-parameters.

    Raises:
        InputError: if there is none; the nearest name is suggested.
    """
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name].algorithm
