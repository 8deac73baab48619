"""MFL, momentum federated learning (Liu et al. 2020; averaging form: Mills et al. 2022).

Clients continue from the server's momentum instead of from zero, and send theirs back::

    client:  d_k <- d                                          at the start of the round
             d_k <- gamma d_k + g                 mfl: the form of a heavy ball
             d_k <- beta d_k + (1 - beta) g       mfl:averaging
             w_k <- w_k - lr d_k
    server:  w <- w - sum_k p_k (w - w_k) ;   d <- sum_k p_k d_k       d = 0 before the first round

``mfl`` weights both sums by examples, as Liu et al. do; ``mfl:averaging`` weights them equally, as
the published code of Mills et al. does. Both gamma and beta are the option ``client.momentum``. The
heavy ball's effective learning rate is ``lr / (1 - gamma)``; our default ``gamma = 0.5`` doubles
it. ``beta = 0.9`` is the value that Mills et al. tuned for two of their three tasks.

Travels down: the model and the momentum. Travels up: the model difference and the momentum. Server
state: the momentum, averaged over the cohort.
Differences from the paper: Liu et al. analyse full batches and full participation, this takes any.
The heavy-ball form was checked against secondary material only.
Degenerate cases: ``gamma = 0`` is FedAvg, ``beta = 0`` is FedAvg with equal weights, bit for bit.
One client alone is one uninterrupted SGD with momentum, however its steps are split into rounds.
"""

from fedzmg.algorithms.moments import AverageSharedState, SharedStateClient
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, Stepped
from fedzmg.tree import State, Tree


@rule_class
class SharedMomentum(SharedStateClient):
    """SGD that continues from the server's momentum and sends its own back."""

    pairing = "mfl"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    momentum: Number = number(0.5, low=0, below=1, doc="gamma or beta, as the form says")
    form: str = choice("heavy_ball", "averaging", doc="adds gradients up, or averages them")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        added = grad if self.form == "heavy_ball" else (1 - self.momentum) * grad
        scratch = self.momentum * scratch + added
        return params - self.lr * scratch, scratch


@rule_class
class AverageMomentum(AverageSharedState):
    """The cohort's mean model and mean momentum."""

    pairing = "mfl"


AVERAGING = SharedMomentum(momentum=0.9, form="averaging")

ALGORITHMS = (
    Algorithm("mfl", SharedMomentum(), AverageMomentum()),
    Algorithm("mfl:averaging", AVERAGING, AverageMomentum(), weights="uniform"),
)
