"""FedGBO (Mills et al. 2022): global statistics of an optimiser, frozen while clients train.

With ``m`` the first moment, ``v`` the second and ``s = sqrt(v) + eps``, all of them the server's::

    client:  w_k <- w_k - lr (beta1 m + (1 - beta1) g)          fedgbo          m = 0 at first
             w_k <- w_k - lr g / s                              fedgbo:rmsprop  v = 1 at first
             w_k <- w_k - lr (beta1 m + (1 - beta1) g) / s      fedgbo:adam     no bias correction
    server:  u <- mean_k (w - w_k) / mean_k (lr K_k)            the mean step; K_k steps by client k
             G <- (s u - beta1 m) / (1 - beta1)                 the step undone: a gradient
             w <- w - mean_k (w - w_k)
             m <- beta1 m + (1 - beta1) G ;   v <- beta2 v + (1 - beta2) G^2

A step is affine in its gradient and the statistics are constant, so ``G`` is exactly the mean
gradient of the round. All clients have the same weight, so with unequal ``K_k`` it is the mean over
all steps of all clients. Decay would be mistaken for gradient by the server, so these clients do
not offer it. With a wrapper that changes gradients, ``G`` is the mean of the changed gradients.

Travels down: the model; ``m`` and the scalar ``beta1`` where there is a first moment; ``s`` (in
place of ``v``, so that ``eps`` stays with the server) where there is a second. Travels up: the
model difference and the scalar ``lr K_k``. Server state: m, v or both.
Differences from the paper: it gives every client the same number of steps; dividing by the mean of
``lr K_k`` is our extension and changes nothing then.
Degenerate cases: ``beta1 = 0`` without a second moment is FedAvg with equal weights;
``beta2 = 0`` keeps only the last round's gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.moments import Statistics, averaged
from fedzmg.contract import Algorithm, ClientRule, Number, ServerRule, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree


class Frozen(NamedTuple):
    """Frozen statistics that the server shares: they map a gradient to a step and back."""

    first: State
    beta1: State
    scale: State

    def direction(self, grad: Tree) -> Tree:
        """Return the step of a gradient, before the learning rate."""
        if isinstance(self.first, Tree):
            grad = averaged(self.first, grad, self.beta1)
        return grad / self.scale if isinstance(self.scale, Tree) else grad

    def gradient(self, direction: Tree) -> Tree:
        """Invert :meth:`direction`."""
        grad = direction * self.scale if isinstance(self.scale, Tree) else direction
        if isinstance(self.first, Tree):
            grad = (grad - self.beta1 * self.first) / (1 - self.beta1)
        return grad


@rule_class
class FrozenSteps(ClientRule):
    """SGD on gradients transformed by the server's frozen statistics."""

    pairing = "fedgbo"

    lr: Number = number(0.1, above=0, doc="client learning rate")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return params - self.lr * context.shared.direction(grad), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        length = self.lr * steps.to(next(iter(params.values())).dtype)
        return Upload(context.params - params, average=length), context.memory


@rule_class
class FedGBOServer(ServerRule):
    """The mean model, and moments of the mean gradient recovered from the mean step."""

    pairing = "fedgbo"

    beta1: Number | None = number(None, low=0, below=1, doc="averaging momentum; absent: none")
    beta2: Number | None = number(None, low=0, below=1, doc="decay of second moment; absent: none")
    eps: Number = number(1e-3, low=0, doc="added to the root of the second moment, if any")

    def init(self, params: Tree) -> Statistics:
        second = () if self.beta2 is None else params.map(torch.ones_like)
        return Statistics(() if self.beta1 is None else params.zeros(), second)

    def share(self, state: Statistics) -> Frozen:
        scale = () if self.beta2 is None else state.second.sqrt() + self.eps
        return Frozen(state.first, () if self.beta1 is None else self.beta1, scale)

    def update(self, params: Tree, state: Statistics, cohort: Cohort) -> tuple[Tree, Statistics]:
        grad = self.share(state).gradient(cohort.delta / cohort.average)
        first, second = state
        if self.beta1 is not None:
            first = averaged(first, grad, self.beta1)
        if self.beta2 is not None:
            second = averaged(second, grad * grad, self.beta2)
        return params - cohort.delta, Statistics(first, second)


ADAM = FedGBOServer(beta1=0.9, beta2=0.99)

ALGORITHMS = (
    Algorithm("fedgbo", FrozenSteps(0.1), FedGBOServer(beta1=0.9), weights="uniform"),
    Algorithm("fedgbo:rmsprop", FrozenSteps(0.01), FedGBOServer(beta2=0.99), weights="uniform"),
    Algorithm("fedgbo:adam", FrozenSteps(0.01), ADAM, weights="uniform"),
)
