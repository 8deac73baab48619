"""FedDyn (Acar et al. 2021): dynamic regularisation of the clients' objectives.

With ``S`` the cohort and ``N`` all clients; every ``h_k`` and ``s`` are zero at first::

    client:  x   <- x - lr (g - h_k + alpha (x - w))              from x = w, to x_k
             h_k <- h_k + alpha (w - x_k)
    server:  s   <- s + 1/N sum over S of (w - x_k)
             w   <- mean over S of x_k - s

Travels down: the model. Travels up: the model difference. Client state: h_k. Server state: s.
Weights are uniform.

Differences from the paper: the server there keeps ``h = alpha s`` and subtracts ``h / alpha``. The
equations are the same, alpha is needed on the clients only, and nothing is divided by a small
number. Local problems are approximated by the local steps, not solved.
Degenerate cases: for ``alpha -> 0`` clients are FedAvg's. With full participation the server moves
by the sum of all updates so far, and ``alpha s`` is the mean of all ``h_k`` after every round. At a
fixed point each ``h_k`` is its client's gradient and their mean is zero: the optimum of the uniform
objective.
"""

from torch import Tensor

from fedzmg.algorithms.moments import CorrectedClient, ZeroState
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree


@rule_class
class FedDyn(CorrectedClient):
    """SGD on the client's objective, corrected by its past and pulled to the global model."""

    pairing = "feddyn"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    alpha: Number = number(0.01, above=0, doc="strength of the regularisation")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        pull = self.alpha * (params - context.params)
        return params - self.lr * (grad - context.memory + pull), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        delta = context.params - params
        return Upload(delta), context.memory + self.alpha * delta


@rule_class
class FedDynServer(ZeroState):
    """The mean of the clients' models, minus the sum of all updates so far."""

    pairing = "feddyn"
    only_weights = "uniform"

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        # Weights are uniform, so the sum over the cohort is its mean times its size.
        state = state + cohort.delta * cohort.size / cohort.population
        return params - cohort.delta - state, state


ALGORITHMS = (Algorithm("feddyn", FedDyn(), FedDynServer(), weights="uniform"),)
