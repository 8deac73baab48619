"""FedACG (Kim, Kim, Han 2024): clients start where the server's momentum is about to go.

With ``m = 0`` at first::

    server:  z   <- w - beta m                            sent in place of w
    client:  w_k <- w_k - lr (g + mu (w_k - z))           from w_k = z
    server:  m   <- beta m + mean_k (z - w_k)
             w   <- w - m                                 the mean of all w_k

Travels down: the model z. Travels up: the difference to z. Server state: m. Weights are uniform.
The paper's lambda is ``server.beta``, its beta is ``client.mu``. The authors' code has a pull of
0.001 without the factor 1/2, which is ``mu = 0.002``.
Results are those of ``w``, never of ``z``.
Degenerate cases: ``beta = 0`` is FedProx, with ``mu = 0`` also FedAvg, both with uniform weights.
``mu = 0`` is FedAvgM whose clients start at the lookahead model.
"""

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedprox import Prox
from fedzmg.algorithms.moments import ZeroState
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


@rule_class
class Lookahead(ZeroState):
    """Accumulating momentum whose next step is taken before clients train."""

    beta: Number = number(0.85, low=0, below=1, doc="share of the velocity that is kept")

    def send(self, params: Tree, state: Tree) -> Tree:
        return params - self.beta * state

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        velocity = self.beta * state + cohort.delta
        return params - velocity, velocity


ALGORITHMS = (Algorithm("fedacg", Prox(SGD(lr=0.1), mu=0.002), Lookahead(), weights="uniform"),)
