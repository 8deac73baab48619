"""FedLion (Tang and Chang 2024): sign steps on the clients, counted in whole ticks.

::

    client:  b_k <- m ;  t_k <- 0                               at the start of the round
             u   <- sign(beta1 b_k + (1 - beta1) g)             with the buffer as it was
             b_k <- beta2 b_k + (1 - beta2) g
             w_k <- w_k - lr u ;   t_k <- t_k + u               the sign of zero is zero
    server:  w <- w - lr mean_k t_k ;   m <- mean_k b_k         m = 0 before the first round

Travels down: the model and the momentum. Travels up: the momentum, the scalar ``lr`` and, in place
of the model difference ``lr t_k``, the ticks ``t_k``: integers between -K and K after K steps, so
they need ``log2(2 K + 1)`` bits. They are sent in the narrowest of int8, int16 and int32 that holds
the longest local training of the round; 127 steps fit into int8, a quarter of a model. Server
state: the momentum. All clients have the same weight, also with unequal numbers of steps.

Differences from the paper: none known in the equations. Its scripts set ``beta1 = beta2 = 0.9``;
the defaults here are those of its optimiser class, which are Lion's. Weight decay, zero in the
scripts, is not offered: with it ``w - w_k`` is not a whole multiple of ``lr``.
Degenerate cases: one local step with ``beta1 = beta2 = 0`` is sign SGD whose votes are averaged. A
projection before the sign does not make the step zero-mean.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.moments import AverageSharedState
from fedzmg.contract import Algorithm, ClientRule, Number, WrapperKind, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree


class LionState(NamedTuple):
    """A client's momentum, and its sign steps added up."""

    momentum: Tree
    ticks: Tree


@rule_class
class LionTicks(ClientRule):
    """Lion from the server's momentum; sends whole ticks of ``lr`` instead of a difference."""

    pairing = "fedlion"
    incompatible: ClassVar[Mapping[WrapperKind, str]] = {
        "project": "its step takes the sign of what was projected, which does not sum to zero"
    }

    lr: Number = number(1e-3, above=0, doc="length of every step in every coordinate")
    beta1: Number = number(0.9, low=0, below=1, doc="weight of the momentum under the sign")
    beta2: Number = number(0.99, low=0, below=1, doc="decay of the momentum")

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> LionState:
        none = context.params.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.int32))
        return LionState(context.shared, none)

    def step(self, context: ClientContext, params: Tree, scratch: LionState, grad: Tree) -> Stepped:
        sign = (self.beta1 * scratch.momentum + (1 - self.beta1) * grad).sign()
        momentum = self.beta2 * scratch.momentum + (1 - self.beta2) * grad
        ticks = scratch.ticks + sign.map(lambda leaf: leaf.to(torch.int32))
        return params - self.lr * sign, LionState(momentum, ticks)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        lr = next(iter(params.values())).new_ones(()) * self.lr
        return Upload(scratch.ticks, average=(scratch.momentum, lr)), context.memory


@rule_class
class FedLionServer(AverageSharedState):
    """Server that moves by the mean number of ticks and keeps the mean momentum."""

    pairing = "fedlion"

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        momentum, lr = cohort.average
        return params - lr * cohort.delta, momentum


ALGORITHMS = (Algorithm("fedlion", LionTicks(), FedLionServer(), weights="uniform"),)
