"""FedAvgM (Hsu et al. 2019): FedAvg with momentum on the server.

::

    client:  w_k <- w_k - lr g
    server:  v   <- beta v + sum_k p_k (w - w_k)                                  v_0 = 0
             w   <- w - server_lr v

Travels down: the model. Travels up: the model difference. Server state: v.

This is the accumulating form of TensorFlow Federated and of the experiments released with Reddi et
al. 2020, whose ``beta = 0.9`` is the default. The averaging form, ``(1 - beta)`` times the new
update, is also in use under this name; at 0.9 it is ten times slower for the same ``server.lr``.
A round that lost every upload leaves v as it was.
Degenerate cases: ``beta = 0`` is FedAvg bit for bit. Updates that never change move the model by
``server_lr / (1 - beta)`` times the update in the end.
"""

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.moments import ZeroState
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import Cohort
from fedzmg.tree import Tree


@rule_class
class Momentum(ZeroState):
    """Accumulating server momentum: ``v <- beta v + delta ; w <- w - lr v``."""

    lr: Number = number(1.0, above=0, doc="server learning rate")
    beta: Number = number(0.9, low=0, below=1, doc="share of the velocity that is kept")

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        velocity = self.beta * state + cohort.delta
        return params - self.lr * velocity, velocity


ALGORITHMS = (Algorithm("fedavgm", SGD(lr=0.1), Momentum()),)
