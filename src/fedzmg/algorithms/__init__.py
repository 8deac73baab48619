"""WHAT is computed: one file per paper, and the table of every algorithm.

Adding an algorithm is one file and one row here; the conformance tests then cover it.
"""

from __future__ import annotations

from fedzmg.algorithms import fedadam, fedavg, fedzmg
from fedzmg.algorithms.entry import Entry
from fedzmg.algorithms.fedadam import Adam, ReddiAdam
from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.fedzmg import ZeroMean, zero_mean
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

ALGORITHMS: dict[str, Entry] = {
    entry.algorithm.name: entry
    for entry in (
        *fedzmg.ENTRIES,
        *fedavg.ENTRIES,
        *fedadam.ENTRIES,
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
