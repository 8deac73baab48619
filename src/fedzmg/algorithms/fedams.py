"""FedAMS (Wang, Lin, Chen 2022): server Adam whose second moment never falls, in three forms.

With ``g`` the pseudo-gradient, ``t`` the server steps done, maxima element by element, and all
state zero at first::

    all:             m <- beta1 m + (1 - beta1) g ;   v <- beta2 v + (1 - beta2) g^2
    fedams           u <- max(u, v, eps) ;   w <- w - lr m / sqrt(u)
    fedams:amsgrad   u <- max(u, v) ;        w <- w - lr m / (sqrt(u) + eps)
    fedams:code      u <- max(u, v)
                     w <- w - lr m / (1 - beta1^t) / (sqrt(u / (1 - beta2^t)) + eps)

``fedams`` and ``fedams:amsgrad`` are the two published options, the third is the authors' code. Its
denominator can shrink, since the maximum is of uncorrected moments. ``eps`` has the scale of ``v``
in ``fedams`` and that of its root in the other two: a value of one is not a value of the other.

Travels down: the model. Travels up: the model difference. Server state: m, v, u and t. Weights are
uniform.
Differences from the paper: ``eps = 1e-3`` in all forms; the authors' code has 1e-8. Compression of
uploads (FedCAMS) is not a part of this rule.
Degenerate cases: ``fedams`` with a huge ``eps`` is averaging server momentum at the learning rate
``lr / sqrt(eps)``. While ``v`` does not fall, ``fedams:amsgrad`` is ``fedadam:reddi`` with
``v0 = 0``.
"""

from typing import NamedTuple

import torch

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import Moments, MomentServer, no_moments, ratio
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


class Peak(NamedTuple):
    """Server state: moments, and the largest second moment so far."""

    moments: Moments
    largest: Tree


@rule_class
class AMS(MomentServer):
    """Adam that divides by the root of the largest second moment so far."""

    eps: Number = number(1e-3, low=0, doc="least second moment; other forms: added to its root")
    form: str = choice("max_eps", "amsgrad", "code", doc="place of eps, and bias correction")

    def init(self, params: Tree) -> Peak:
        return Peak(no_moments(params), params.zeros())

    def update(self, params: Tree, state: Peak, cohort: Cohort) -> tuple[Tree, Peak]:
        moments = self.moments(state.moments, cohort.delta)
        largest = state.largest.map(torch.maximum, moments.second)
        rate, added = self.lr, self.eps
        if self.form == "max_eps":
            largest = largest.map(lambda leaf: torch.maximum(leaf, leaf * 0 + self.eps))
            added = 0.0
        root = largest.sqrt()
        if self.form == "code":
            rate = rate / (1 - self.beta1**moments.steps)
            root = root * (1 - self.beta2**moments.steps) ** -0.5
        return params - rate * moments.first.map(ratio, root + added), Peak(moments, largest)


ALGORITHMS = (
    Algorithm("fedams", SGD(lr=0.1), AMS(form="max_eps"), weights="uniform"),
    Algorithm("fedams:amsgrad", SGD(lr=0.1), AMS(form="amsgrad"), weights="uniform"),
    Algorithm("fedams:code", SGD(lr=0.1), AMS(form="code"), weights="uniform"),
)
