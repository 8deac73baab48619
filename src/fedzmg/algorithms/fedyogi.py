"""FedYogi (Reddi et al. 2020): FedAdam whose second moment moves by a bounded amount.

With ``g`` the pseudo-gradient (averaged ``w_global - w_local``) and ``t`` the server steps done::

    both:     m <- beta1 m + (1 - beta1) g ;   v <- v - (1 - beta2) g^2 sign(v - g^2)
    fedyogi        w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)    v_0 = 1e-6
    fedyogi:reddi  w <- w - lr m / (sqrt(v) + tau)                                      v_0 = tau^2

``fedyogi`` is TensorFlow Federated's optimiser, ``fedyogi:reddi`` is Algorithm 2 of Reddi et al.
(and Flower's strategy, with another tau). The code released with the paper starts v at 0:
``server.v0 = 0``.

Travels down: the model. Travels up: the model difference. Server state: m, v and t.
Degenerate cases: where ``v`` equals ``g^2`` it stays; the first round from ``v0 = 0`` is FedAdam's;
a coordinate that never moved stays.
"""

from fedzmg.algorithms import moments
from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import Moments, MomentServer, ReddiServer, averaged
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


def yogi_moments(before: Moments, grad: Tree, beta1: Number, beta2: Number) -> Moments:
    """Update the first moment like Adam; the second moves to ``g^2`` by ``(1 - beta2) g^2``."""
    square = grad * grad
    second = before.second - (1 - beta2) * (square * (before.second - square).sign())
    return Moments(averaged(before.first, grad, beta1), second, before.steps + 1)


@rule_class
class Yogi(MomentServer):
    """Yogi with Adam's bias correction, as in TFF."""

    beta2: Number = number(0.99, low=0, below=1, doc="inertia of the second moment")
    eps: Number = number(1e-3, low=0, doc="added to the root of the second moment")
    v0: Number = number(1e-6, low=0, doc="initial second moment")

    def init(self, params: Tree) -> Moments:
        return moments.no_moments(params, self.v0)

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = yogi_moments(state, cohort.delta, self.beta1, self.beta2)
        rate = self.lr * moments.correction(self.beta1, self.beta2, state.steps)
        return params - rate * moments.direction(state, self.eps), state


@rule_class
class ReddiYogi(ReddiServer):
    """Yogi as published by Reddi et al.: no bias correction, second moment starts at ``tau^2``."""

    beta2: Number = number(0.99, low=0, below=1, doc="inertia of the second moment")

    def moments(self, before: Moments, grad: Tree) -> Moments:
        return yogi_moments(before, grad, self.beta1, self.beta2)


ALGORITHMS = Algorithm("fedyogi", SGD(), Yogi()), Algorithm("fedyogi:reddi", SGD(), ReddiYogi())
