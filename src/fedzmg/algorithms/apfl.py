"""APFL (Deng et al. 2020): every client mixes the common model with one of its own.

With ``w_k`` the client's copy of the common model, ``v_k`` its own, and ``m = alpha_k v_k +
(1 - alpha_k) w_k``, everything right of the arrows at its old value::

    client:  w_k     <- w_k - lr g(w_k)                    uploaded, as FedAvg
             v_k     <- v_k - lr alpha_k g(m)              kept
             alpha_k <- clip(alpha_k - alpha_lr <v_k - w_k, g(m)>, 0, 1)
    server:  w       <- w - server_lr sum_k p_k (w - w_k)

``alpha_k`` changes in the first step of a round, in every step or never (``client.adapt``).
Travels down: the model. Travels up: the model difference. Client state: v_k and alpha_k. v_k starts
at the model that the client receives first. A client uses ``alpha_k v_k + (1 - alpha_k) w`` with
the newest common model w. Two gradients per step. Schedules do not change ``alpha_lr``.

Differences from the authors' code: models are mixed, not their outputs, and the gradient of
``alpha_k`` has no further term. The newest common model takes the place of the client's own copy in
the mixture that is evaluated.
Degenerate cases: ``alpha = 0`` without adapting is FedAvg, ``alpha = 1`` local training.
"""

from typing import Any

import torch
from torch import Tensor

from fedzmg.algorithms.ditto import OwnModelClient, no_own_model
from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree


def mixture(alpha: Tensor, own: Tree, common: Tree) -> Tree:
    """Return ``alpha own + (1 - alpha) common``."""
    return alpha * own + (1 - alpha) * common


@rule_class
class APFL(OwnModelClient):
    """SGD on the common model, and SGD on an own one through their mixture."""

    gradients_per_step = 2

    lr: Number = number(0.1, above=0, doc="client learning rate")
    alpha: Number = number(0.5, low=0, high=1, doc="share of the own model at first")
    alpha_lr: Number = number(0.1, low=0, doc="learning rate of the share")
    adapt: str = choice("first_step", "every_step", "never", doc="steps that change the share")

    def init_memory(self, params: Tree) -> State:
        own = no_own_model(params)
        return own, own.exists + self.alpha

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        own, alpha = context.memory
        return own.or_else(context.params), alpha, torch.ones_like(alpha), context.params.zeros()

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        own, alpha, first, _ = scratch
        return mixture(alpha, own, params), (own, alpha, first, grad)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own, alpha, first, common = scratch
        new = alpha
        if self.adapt != "never":
            apart = ((own - params) * grad).map(torch.sum)
            slope = torch.stack(list(apart.values())).sum()
            moved = (alpha - self.alpha_lr * slope).clamp(0, 1)
            new = torch.where(first > 0, moved, alpha) if self.adapt == "first_step" else moved
        scratch = own - self.lr * alpha * grad, new, torch.zeros_like(first), common
        return params - self.lr * common, scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        own, alpha, _, _ = scratch
        return Upload(context.params - params), (context.memory[0].replaced(own), alpha)

    def personal_model(self, params: Tree, memory: State) -> Tree:
        own, alpha = memory
        return mixture(alpha, own.or_else(params), params)


ALGORITHMS = (Algorithm("apfl", APFL(), Average()),)
