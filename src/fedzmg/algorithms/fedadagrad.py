"""FedAdagrad (Reddi et al. 2020): learning rates that fall with the sum of squared updates.

With ``g`` the pseudo-gradient (averaged ``w_global - w_local``)::

    both:     v <- v + g^2
    fedadagrad        w <- w - lr g / sqrt(v + eps)                       v_0 = 0.1
    fedadagrad:reddi  w <- w - lr m / (sqrt(v) + tau)                     v_0 = tau^2
                      m <- beta1 m + (1 - beta1) g

``fedadagrad`` is TensorFlow Federated's optimiser, whose epsilon (1e-7) is inside of the root;
``fedadagrad:reddi`` is Algorithm 2 of Reddi et al. with tau = 1e-3, outside of it. Its experiments
have ``beta1 = 0``, so m is g and need not be kept: the term is absent unless ``server.beta1`` is
set. The code released with the paper starts v at 0: ``server.v0 = 0``.

Travels down: the model. Travels up: the model difference. Server state: v (and m, if there is one).
Degenerate cases: ``beta1 = 0`` equals no beta1; the first step from ``v0 = 0`` with nothing added
is a sign step; a coordinate that never moved stays.
"""

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import Statistics, averaged, ratio
from fedzmg.contract import Algorithm, Number, ServerRule, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


@rule_class
class Adagrad(ServerRule):
    """Adagrad with epsilon inside the root, as in TFF."""

    lr: Number = number(0.1, above=0, doc="server learning rate")
    eps: Number = number(1e-7, low=0, doc="added to the sum of squares, inside the root")
    v0: Number = number(0.1, low=0, doc="initial sum of squares")

    def init(self, params: Tree) -> Tree:
        return params.zeros() + self.v0

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        squares = state + cohort.delta * cohort.delta
        return params - self.lr * cohort.delta.map(ratio, (squares + self.eps).sqrt()), squares


@rule_class
class ReddiAdagrad(ServerRule):
    """Adagrad as published by Reddi et al.: tau outside the root, squares start at ``tau^2``."""

    lr: Number = number(0.1, above=0, doc="server learning rate")
    beta1: Number | None = number(None, low=0, below=1, doc="decay of the first moment")
    tau: Number = number(1e-3, low=0, doc="degree of adaptivity, added to the root")
    v0: Number | None = number(None, low=0, doc="initial sum of squares; tau^2 if absent")

    def init(self, params: Tree) -> Statistics:
        start = self.tau * self.tau if self.v0 is None else self.v0
        return Statistics(() if self.beta1 is None else params.zeros(), params.zeros() + start)

    def update(self, params: Tree, state: Statistics, cohort: Cohort) -> tuple[Tree, Statistics]:
        first, kept, squares = cohort.delta, state.first, state.second + cohort.delta * cohort.delta
        if self.beta1 is not None:
            first = kept = averaged(kept, first, self.beta1)
        step = first.map(ratio, squares.sqrt() + self.tau)
        return params - self.lr * step, Statistics(kept, squares)


ALGORITHMS = (
    Algorithm("fedadagrad", SGD(lr=0.1), Adagrad()),
    Algorithm("fedadagrad:reddi", SGD(lr=0.1), ReddiAdagrad()),
)
