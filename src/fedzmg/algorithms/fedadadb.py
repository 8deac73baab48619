"""FedAdaDB (Zantalis 2025): server Adam whose learning rates are bounded by the data (AdaDB).

AdaDB is by Yang and Cai 2021. With ``g`` the pseudo-gradient (averaged ``w_global - w_local``),
``t`` the server steps done, everything per coordinate and ``max`` over one tensor, not the model::

    m <- beta1 m + (1 - beta1) g ;   v <- beta2 v + (1 - beta2) g^2               m_0 = v_0 = 0
    m^ = m / (1 - beta1^t) ;   v^ = v / (1 - beta2^t)
    eta = clip(a / sqrt(v^), low = floor, high = floor + r) ;   w <- w - eta m^

    fedadadb           a = lr sqrt(1 - beta2^t) / (1 - beta1^t)    r = |m^| / (gamma max|m^|)
    fedadadb:original  a = lr                                      r = |m^| / (gamma t max|m^|)

``fedadadb`` follows the code of FedAdaDB's author with the constants of its training script (0.9,
0.999, gamma 1e-4, floor 1). It corrects the bias twice, in ``a`` and in ``m^, v^``; its gamma,
named epsilon there, is the inverse width of the bound, not a stabiliser. With floor 1 and a usual
lr nearly every coordinate is at the floor, where the method is FedAvg with averaged, corrected
momentum. ``fedadadb:original`` has AdaDB's own bound, which tightens like 1/t, after another
implementation with typical constants. ``server.bound`` and ``server.correction`` mix the two.

Travels down: the model. Travels up: the model difference. Server state: m, v and t.
Difference from the code: a tensor without any update has r = 0/0 there; here it does not move.
Degenerate cases: the first round of ``fedadadb`` is FedAvg with server lr 1 where
``lr sqrt(1 - beta2) / (1 - beta1) <= |g|``; a large gamma sets every learning rate to the floor.
"""

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import Moments, MomentServer, correction
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


@rule_class
class AdaDB(MomentServer):
    """Adam with learning rates between ``floor`` and ``floor + r``."""

    beta2: Number = number(0.999, low=0, below=1, doc="decay of the second moment")
    gamma: Number = number(1e-4, above=0, doc="inverse width of the bound")
    floor: Number = number(1.0, low=0, doc="lower bound of every learning rate (alpha*)")
    bound: str = choice("constant", "inverse_round", doc="change of the bounds over rounds")
    correction: str = choice("double", "single", doc="bias-corrected moments: both, or the first")

    def update(self, params: Tree, state: Moments, cohort: Cohort) -> tuple[Tree, Moments]:
        state = self.moments(state, cohort.delta)
        rate = torch.ones_like(state.steps) * self.lr
        if self.correction == "double":
            rate = rate * correction(self.beta1, self.beta2, state.steps)
        gamma = self.gamma * state.steps if self.bound == "inverse_round" else self.gamma

        def step(first: Tensor, second: Tensor) -> Tensor:
            size = first.abs()
            largest = size.amax()
            # Divided by the largest entry first, so that tiny tensors do not underflow. A tensor of
            # zeros gets a width of zero, and its step is zero because its first moment is.
            width = size / torch.where(largest > 0, largest, torch.ones_like(largest)) / gamma
            low = torch.zeros_like(width) + self.floor
            return torch.clamp(rate / second.sqrt(), low, low + width) * first

        first = state.first / (1 - self.beta1**state.steps)
        second = state.second / (1 - self.beta2**state.steps)
        return params - first.map(step, second), state


ORIGINAL = AdaDB(lr=1e-3, gamma=1e-3, floor=0.1, bound="inverse_round", correction="single")

ALGORITHMS = Algorithm("fedadadb", SGD(), AdaDB()), Algorithm("fedadadb:original", SGD(), ORIGINAL)
