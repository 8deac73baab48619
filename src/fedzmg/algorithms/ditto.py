"""Ditto (Li et al. 2021): FedAvg, and a personal model of every client that is pulled to it.

With ``w`` the received model, ``w_k`` the client's copy and ``v_k`` its personal model::

    client:  w_k <- w_k - lr g(w_k)                              uploaded, as FedAvg
             v_k <- v_k - personal_lr (g(v_k) + lam (v_k - w))   kept
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. Client state: v_k, which starts at the
model that the client receives first. Two gradients per step, on the same batch.
A client learning-rate schedule scales ``lr`` alone, and with it an absent ``personal_lr``.

Differences from the paper: the personal model of a client starts at the received model instead of
the initial one, both models take the same number of steps, and weights are examples, not uniform.
Degenerate cases: ``lam = 0`` is local training; for a large ``lam`` the personal models stay at w.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, ClientRule, Number, WrapperKind, number, rule_class
from fedzmg.messages import ClientContext, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree

SEVERAL_POINTS: Mapping[WrapperKind, str] = {
    "pull": "a step has gradients at several models, and the pull is that of one of them"
}
"""Reason to refuse pulls around a rule."""


class OwnModel(NamedTuple):
    """Memory of a client: a model of its own, and a flag that there is one."""

    params: Tree
    exists: Tensor

    def or_else(self, params: Tree) -> Tree:
        """Return the model, or the given one if there is none yet."""
        return self.params.map(lambda own, new: torch.where(self.exists > 0, own, new), params)

    def replaced(self, params: Tree) -> "OwnModel":
        return OwnModel(params, torch.ones_like(self.exists))


def no_own_model(params: Tree) -> OwnModel:
    """Return the memory of a client without a model of its own."""
    return OwnModel(params.zeros(), next(iter(params.values())).new_zeros(()))


class OwnModelClient(ClientRule):
    """A client that keeps a model of its own, and uses it."""

    incompatible = SEVERAL_POINTS
    is_personal = True

    def init_memory(self, params: Tree) -> State:
        return no_own_model(params)

    def personal_model(self, params: Tree, memory: OwnModel) -> Tree:
        return memory.or_else(params)


@rule_class
class Ditto(OwnModelClient):
    """SGD on the common model, and SGD on a personal one that is pulled to the received model."""

    gradients_per_step = 2

    lr: Number = number(0.1, above=0, doc="client learning rate")
    lam: Number = number(1.0, low=0, doc="strength of the pull to the received model")
    personal_lr: Number | None = number(None, above=0, doc="of the personal model; absent: lr")

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return context.memory.or_else(context.params), context.params.zeros()

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        return scratch[0], (scratch[0], grad)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own, common = scratch
        rate = self.lr if self.personal_lr is None else self.personal_lr
        moved = own - rate * (grad + self.lam * (own - context.params))
        return params - self.lr * common, (moved, common)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - params), context.memory.replaced(scratch[0])


ALGORITHMS = (Algorithm("ditto", Ditto(), Average()),)
