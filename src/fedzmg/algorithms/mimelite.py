"""MimeLite (Karimireddy et al. 2021), momentum form: clients apply the server's momentum.

With ``m`` the server's momentum, zero at first and frozen during local training, averaging form::

    client:  x <- x - lr (beta m + (1 - beta) g)                from x = w, to x_k
    server:  w <- w - server_lr mean over the cohort of (w - x_k)
             m <- beta m + (1 - beta) mean over the cohort of the gradient of F_k at w

The gradient that enters ``m`` is over all of a client's data, at the model that was sent.

Travels down: the model and m; beta as a scalar, so that it is set in one place, on the server.
Travels up: the model difference and the full gradient. Client state: none. Server state: m. Weights
are uniform.

Differences from the paper: Mime proper also corrects the local gradients in the manner of SVRG; the
Lite form, here, does not. Other statistics than momentum are left out.
Degenerate cases: ``beta = 0`` is FedAvg with uniform weights. The first round is FedAvg's with
``(1 - beta) lr`` as learning rate.
"""

from fedzmg.algorithms.moments import SharedStateClient, SharingServer
from fedzmg.contract import Algorithm, Number, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, Stepped
from fedzmg.tree import State, Tree


@rule_class
class MimeLite(SharedStateClient):
    """SGD that mixes the received momentum into each gradient, and uploads its full gradient."""

    pairing = "mimelite"
    full_pass = "start"

    lr: Number = number(0.1, above=0, doc="client learning rate")

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> Tree:
        assert isinstance(full_pass, FullPass)
        return full_pass.grad

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        momentum, beta = context.shared
        return params - self.lr * (beta * momentum + (1 - beta) * grad), scratch


@rule_class
class MimeLiteServer(SharingServer):
    """Average the models, and let the momentum follow the mean full gradient."""

    pairing = "mimelite"

    beta: Number = number(0.9, low=0, below=1, doc="decay of the momentum, averaging form")

    def share(self, state: Tree) -> State:
        return state, self.beta

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        momentum = self.beta * state + (1 - self.beta) * cohort.average
        return params - self.lr * cohort.delta, momentum


ALGORITHMS = (Algorithm("mimelite", MimeLite(), MimeLiteServer(), weights="uniform"),)
