"""MoFedSAM (Qu et al. 2022): FedSAM whose local steps mix in the last cohort's direction.

With ``g2`` the second gradient of FedSAM and ``K_k`` the steps that a client did::

    client:  w_k <- w_k - lr (beta g2 + (1 - beta) m)             m is fixed during the round
    server:  m   <- mean_k (w - w_k) / (K_k lr)                   m = 0 before the first round
             w   <- w - server_lr mean_k (w - w_k)

So ``m`` is an exponential average of perturbed gradients over about ``1 / beta`` rounds. Note that
``beta`` is the weight of the new gradient.

Travels down: the model and m. Travels up: the model difference; the number of steps and lr, from
which the server computes the client's part of m, are scalars. Server state: m.
The first round moves by ``beta`` times a normal step, because m is zero;
``client.first_round = "gradient"`` takes ``beta = 1`` there.

Differences from the paper: it writes the server's step as ``eta_g m``, that is
``server_lr = eta_g / (K lr)``. A learning rate that changes and unequal numbers of steps are taken
into account client by client. The FL-Simulator divides by the steps of the first client for all.
Degenerate cases: ``beta = 1`` is FedSAM with equal weights; ``rho = 0`` is FedCM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from torch import Tensor

from fedzmg.algorithms.fedsam import SAM
from fedzmg.contract import Algorithm, AlgorithmInfo, ClientRule, Number, ServerRule, choice, number
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree

FirstRound = Literal["mixed", "gradient"]


@final
@dataclass(frozen=True)
class MixedDirection(ClientRule):
    """SGD along its own gradient and the last cohort's mean direction."""

    pairing = "mofedsam"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    beta: Number = number(0.1, above=0, high=1, doc="weight of the client's own gradient")
    first_round: FirstRound = choice(
        *get_args(FirstRound), doc="first round: mixed with m = 0, or the gradient alone"
    )

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own: Number = self.beta
        if self.first_round == "gradient":
            leaf = next(iter(params.values()))
            own = torch.where(context.round == 1, leaf.new_ones(()), leaf.new_ones(()) * self.beta)
        return params - self.lr * (own * grad + (1 - own) * context.shared), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        delta = context.params - params
        return Upload(delta, average=delta / self.lr / steps.clamp(min=1)), context.memory

    def wire(self, upload: Upload) -> State:
        return upload.delta  # the server computes the rest from scalars


@final
@dataclass(frozen=True)
class MixedDirectionServer(ServerRule):
    """The average, and the cohort's mean direction for the next one."""

    pairing = "mofedsam"

    lr: Number = number(1.0, above=0, doc="server learning rate")

    def init(self, params: Tree) -> Tree:
        return params.zeros()

    def share(self, state: Tree) -> Tree:
        return state

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        return params - self.lr * cohort.delta, cohort.average


FAMILY = "second gradients"
ALGORITHMS = (
    AlgorithmInfo(
        Algorithm("mofedsam", SAM(MixedDirection()), MixedDirectionServer(), weights="uniform"),
        summary="FedSAM's gradients mixed with the last cohort's direction; server average",
        source="Qu et al. 2022",
        down=2,
        server_keeps=1,
        inferred="the scale of the server's step",
    ),
)
