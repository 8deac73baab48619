"""WHAT is computed: one file per paper, and the table of every algorithm.

Adding an algorithm is one file and one row here; the conformance tests then cover it.
"""

from __future__ import annotations

from fedzmg.algorithms import (
    adabest,
    fedadadb,
    fedadagrad,
    fedadam,
    fedadap,
    fedavg,
    fedavgm,
    fedcada,
    feddyn,
    fedgbo,
    fedlion,
    fedprox,
    fedyogi,
    fedzmg,
    gradient_centralization,
    hybrids,
    mfl,
    mimelite,
    scaffold,
)
from fedzmg.algorithms.entry import Entry
from fedzmg.algorithms.fedadadb import AdaDB
from fedzmg.algorithms.fedadagrad import Adagrad, ReddiAdagrad
from fedzmg.algorithms.fedadam import Adam, ReddiAdam
from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.fedavgm import Momentum
from fedzmg.algorithms.fedyogi import ReddiYogi, Yogi
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.gradient_centralization import Coupled
from fedzmg.algorithms.projected import Projected
from fedzmg.algorithms.projection import zero_mean
from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import Algorithm
from fedzmg.errors import unknown

__all__ = [
    "ALGORITHMS",
    "SGD",
    "AdaDB",
    "Adagrad",
    "Adam",
    "Average",
    "Coupled",
    "Entry",
    "Momentum",
    "Projected",
    "ReddiAdagrad",
    "ReddiAdam",
    "ReddiYogi",
    "Yogi",
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
        *fedavgm.ENTRIES,
        *fedyogi.ENTRIES,
        *fedadagrad.ENTRIES,
        *fedadadb.ENTRIES,
        *hybrids.ENTRIES,
        *gradient_centralization.ENTRIES,
        *mfl.ENTRIES,
        *fedgbo.ENTRIES,
        *fedlion.ENTRIES,
        *fedcada.ENTRIES,
        *fedadap.ENTRIES,
        *fedprox.ENTRIES,
        *scaffold.ENTRIES,
        *feddyn.ENTRIES,
        *mimelite.ENTRIES,
        *adabest.ENTRIES,
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
