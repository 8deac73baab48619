"""FedAdam (Reddi et al. 2020): an Adam step on the server, in the three forms that share the name.

With ``g`` the pseudo-gradient (averaged ``w_global - w_local``) and ``t`` the server steps done::

    all:      m <- beta1 m + (1 - beta1) g ;   v <- beta2 v + (1 - beta2) g^2
    fedadam         w <- w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)   v_0 = 0
    fedadam:flower  the same with t + 1 instead of t, and eps = 1e-9                    v_0 = 0
    fedadam:reddi   w <- w - lr m / (sqrt(v) + tau)                                     v_0 = tau^2

``fedadam`` is TensorFlow Federated's optimiser, which the FedZMG paper ran with (0.9, 0.99, 1e-3);
``fedadam:reddi`` is Algorithm 2 of Reddi et al. 2020. These two agree after one round with these
constants and differ from the second on. ``fedadam:flower`` is Flower's strategy, whose exponent is
larger by one.

Travels down: the model. Travels up: the model difference. Server state: m, v and t.
Difference from Flower: its exponent counts rounds, ours server steps; they differ only after a
round that lost every upload.
Degenerate cases: ``beta1 = beta2 = 0``, ``tau = 0``, ``v0 = 0`` gives a sign step; a coordinate
that never moved stays.
"""

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import Moments, MomentServer, ReddiServer, correction, direction
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


@rule_class
class Adam(MomentServer):
    """Bias-corrected Adam with epsilon outside the root ("epsilon-hat"), as in TFF."""

    eps: Number = number(1e-3, low=0, doc="added to the root of the second moment")
    exponent: str = choice("step", "next_step", doc="bias correction's exponent; next_step: Flower")

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = self.moments(state, cohort.delta)
        power = state.steps + 1 if self.exponent == "next_step" else state.steps
        rate = self.lr * correction(self.beta1, self.beta2, power)
        return params - rate * direction(state, self.eps), state


@rule_class
class ReddiAdam(ReddiServer):
    """Adam as published by Reddi et al.: no bias correction, second moment starts at ``tau^2``."""


ALGORITHMS = (
    Algorithm("fedadam", SGD(lr=0.1), Adam()),
    Algorithm("fedadam:reddi", SGD(lr=0.1), ReddiAdam()),
    Algorithm("fedadam:flower", SGD(lr=0.1), Adam(eps=1e-9, exponent="next_step")),
)
