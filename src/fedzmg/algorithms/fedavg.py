"""FedAvg (McMahan et al. 2017): local SGD, example-weighted averaging.

::

    client:  w_k <- w_k - lr g                       (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none.
``fedavg:momentum`` has FedZMG's momentum 0.9 and decoupled decay 0.0005: the two differ by the
projection alone.
Degenerate cases: ``server.lr = 1`` makes the new model the weighted mean of the clients' models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import Algorithm, AlgorithmInfo, Number, ServerRule, number
from fedzmg.messages import Cohort
from fedzmg.tree import State, Tree


@final
@dataclass(frozen=True)
class Average(ServerRule):
    """Move the model along the averaged client update: ``w <- w - lr delta``."""

    lr: Number = number(1.0, above=0, doc="server learning rate")

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - self.lr * cohort.delta, state


FAMILY = "plain clients, server optimizers"
ALGORITHMS = (
    AlgorithmInfo(
        Algorithm("fedavg", SGD(lr=0.1), Average()),
        summary="local SGD; server average",
        source="McMahan et al. 2017",
    ),
    AlgorithmInfo(
        Algorithm("fedavg:momentum", SGD(lr=0.1, momentum=0.9, decay=5e-4), Average()),
        summary="FedAvg with FedZMG's momentum and decoupled decay; server average",
        source="McMahan et al. 2017, with the settings of Zantalis et al. 2026",
    ),
)
