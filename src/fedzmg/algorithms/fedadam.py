"""FedAdam: an Adam step on the server, in the two forms that share the name.

With ``g`` the pseudo-gradient (averaged ``w_global - w_local``) and ``t`` the server steps done::

    both:     m <- beta1 m + (1 - beta1) g ;   v <- beta2 v + (1 - beta2) g^2
    fedadam        w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)    v_0 = 0
    fedadam:reddi  w <- w - lr m / (sqrt(v) + tau)                                      v_0 = tau^2

``fedadam`` is TensorFlow Federated's optimiser, which the FedZMG paper ran with (0.9, 0.99, 1e-3);
``fedadam:reddi`` is Algorithm 2 of Reddi et al. 2020. They agree after one round with these
constants and differ from the second on.

Travels down: the model. Travels up: the model difference. Server state: m, v and t.
Degenerate cases: ``beta1 = beta2 = 0``, ``tau = 0``, ``v0 = 0`` gives a sign step; a coordinate
that never moved stays put.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from fedzmg.algorithms.entry import Entry
from fedzmg.algorithms.sgd import SGD
from fedzmg.contract import Algorithm, Cohort, Number, ServerRule, number
from fedzmg.tree import Tree


class Moments(NamedTuple):
    """Server state: first and second moment of the pseudo-gradient, number of steps done."""

    first: Tree
    second: Tree
    steps: Tensor


def _updated(moments: Moments, grad: Tree, beta1: Number, beta2: Number) -> Moments:
    return Moments(
        beta1 * moments.first + (1 - beta1) * grad,
        beta2 * moments.second + (1 - beta2) * (grad * grad),
        moments.steps + 1,
    )


def _ratio(first: Tensor, root: Tensor) -> Tensor:
    """``first / root``, zero where the root is: a coordinate without history must stay put."""
    return torch.where(root == 0, torch.zeros_like(first), first / root)


@final
@dataclass(frozen=True)
class Adam(ServerRule):
    """Bias-corrected Adam with epsilon outside the root ("epsilon-hat"), as in TFF."""

    lr: Number = number(0.1, above=0, doc="server learning rate")
    beta1: Number = number(0.9, low=0, below=1, doc="decay of the first moment")
    beta2: Number = number(0.99, low=0, below=1, doc="decay of the second moment")
    eps: Number = number(1e-3, low=0, doc="added to the root of the second moment")

    def init(self, params: Tree) -> Moments:
        return Moments(params.zeros(), params.zeros(), _no_steps(params))

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = _updated(state, cohort.delta, self.beta1, self.beta2)
        correction = (1 - self.beta2**state.steps) ** 0.5 / (1 - self.beta1**state.steps)
        step = state.first.map(_ratio, state.second.sqrt() + self.eps)
        return params - (self.lr * correction) * step, state


@final
@dataclass(frozen=True)
class ReddiAdam(ServerRule):
    """Adam as published by Reddi et al.: no bias correction, second moment starts at ``tau^2``."""

    lr: Number = number(0.1, above=0, doc="server learning rate")
    beta1: Number = number(0.9, low=0, below=1, doc="decay of the first moment")
    beta2: Number = number(0.99, low=0, below=1, doc="decay of the second moment")
    tau: Number = number(1e-3, low=0, doc="degree of adaptivity, added to the root")
    v0: Number | None = number(None, low=0, doc="initial second moment; tau^2 if absent")

    def init(self, params: Tree) -> Moments:
        start = self.tau * self.tau if self.v0 is None else self.v0
        return Moments(params.zeros(), params.zeros() + start, _no_steps(params))

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = _updated(state, cohort.delta, self.beta1, self.beta2)
        step = state.first.map(_ratio, state.second.sqrt() + self.tau)
        return params - self.lr * step, state


def _no_steps(params: Tree) -> Tensor:
    # Of the parameters' dtype, because it is an exponent of hyper-parameters that have it too.
    return next(iter(params.values())).new_zeros(())


ENTRIES = (
    Entry(
        Algorithm("fedadam", SGD(lr=0.1), Adam()),
        summary="local SGD; bias-corrected server Adam as in TFF (the paper's baseline)",
        source="Reddi et al. 2020, TensorFlow Federated",
        about=__doc__,
        server_keeps=2,
    ),
    Entry(
        Algorithm("fedadam:reddi", SGD(lr=0.1), ReddiAdam()),
        summary="local SGD; server Adam as published, without bias correction",
        source="Reddi et al. 2020",
        about=__doc__,
        server_keeps=2,
    ),
)
