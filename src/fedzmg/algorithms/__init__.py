"""WHAT is computed: one file per paper, and the table of every algorithm.

An algorithm is one file, and here its import, the export of its rules and its row in the table; the
conformance tests then cover it. CONTRIBUTING.md has an example.
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
from fedzmg.algorithms.adabest import AdaBest, AdaBestServer
from fedzmg.algorithms.clip import ClipNorm, ClipValue
from fedzmg.algorithms.decay import ServerDecay
from fedzmg.algorithms.fedadadb import AdaDB
from fedzmg.algorithms.fedadagrad import Adagrad, ReddiAdagrad
from fedzmg.algorithms.fedadam import Adam, ReddiAdam
from fedzmg.algorithms.fedadap import AdaptiveSGD
from fedzmg.algorithms.fedavg import Average
from fedzmg.algorithms.fedavgm import Momentum
from fedzmg.algorithms.fedcada import AverageMoments, SharedAdam
from fedzmg.algorithms.feddyn import FedDyn, FedDynServer
from fedzmg.algorithms.fedgbo import FedGBOServer, FrozenSteps
from fedzmg.algorithms.fedlion import FedLionServer, LionTicks
from fedzmg.algorithms.fedprox import AdaptiveMu, Prox, ServerSetProx
from fedzmg.algorithms.fedyogi import ReddiYogi, Yogi
from fedzmg.algorithms.fedzmg import ZeroMean
from fedzmg.algorithms.gradient_centralization import CoupledDecay
from fedzmg.algorithms.info import AlgorithmInfo
from fedzmg.algorithms.mfl import AverageMomentum, SharedMomentum
from fedzmg.algorithms.mimelite import MimeLite, MimeLiteServer
from fedzmg.algorithms.projected import Projected
from fedzmg.algorithms.projection import zero_mean
from fedzmg.algorithms.scaffold import Scaffold, ScaffoldServer
from fedzmg.algorithms.schedule import ClientSchedule, ServerSchedule
from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import Algorithm
from fedzmg.errors import unknown

__all__ = [
    "ALGORITHMS",
    "SGD",
    "AdaBest",
    "AdaBestServer",
    "AdaDB",
    "Adagrad",
    "Adam",
    "AdaptiveMu",
    "AdaptiveSGD",
    "AlgorithmInfo",
    "Average",
    "AverageMoments",
    "AverageMomentum",
    "ClientSchedule",
    "ClipNorm",
    "ClipValue",
    "CoupledDecay",
    "FedDyn",
    "FedDynServer",
    "FedGBOServer",
    "FedLionServer",
    "FrozenSteps",
    "LionTicks",
    "MimeLite",
    "MimeLiteServer",
    "Momentum",
    "Projected",
    "Prox",
    "ReddiAdagrad",
    "ReddiAdam",
    "ReddiYogi",
    "Scaffold",
    "ScaffoldServer",
    "ServerDecay",
    "ServerSchedule",
    "ServerSetProx",
    "SharedAdam",
    "SharedMomentum",
    "Yogi",
    "ZeroMean",
    "get",
    "zero_mean",
]

ALGORITHMS: dict[str, AlgorithmInfo] = {
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
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise unknown("algorithm", str(name), ALGORITHMS, "fedzmg list")
    return ALGORITHMS[name].algorithm
