"""pFedMe (T. Dinh et al. 2020): clients train the Moreau envelope of their losses.

With ``theta`` the personal model; ``w_k`` and ``theta`` start at the received ``w``::

    client:  theta <- theta - personal_lr (g(theta) + lam (theta - w_k))
             w_k   <- w_k - lr lam (w_k - theta)
    server:  w     <- (1 - beta) w + beta sum_k p_k w_k

Every batch moves theta by ``inner_steps`` steps and w_k by one. ``server.lr`` is the paper's beta.
Travels down: the model. Travels up: the model difference. Client state: theta, with which the
client is evaluated; w if it never took part. ``inner_steps`` gradients per step. A client
learning-rate schedule scales ``lr`` alone, not ``personal_lr``.

Differences from the authors' code: only the cohort trains, there is no weight decay in the inner
steps, and theta is a copy, where the code evaluates ``w_k`` instead.
Degenerate cases: ``lam = 0`` never moves the common model; ``lr lam = 1`` makes ``w_k = theta``.
With one inner step, too, that is FedAvg with the learning rate ``personal_lr``.
"""

from typing import Any

from torch import Tensor

from fedzmg.algorithms.ditto import OwnModelClient
from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, Number, choice, number, rule_class, whole
from fedzmg.messages import ClientContext, FullPass, Result, Stepped, Upload
from fedzmg.tree import State, Tree


@rule_class
class PFedMe(OwnModelClient):
    """Proximal steps of a personal model, and steps of the common one towards it."""

    lr: Number = number(0.005, above=0, doc="client learning rate")
    lam: Number = number(15.0, low=0, doc="strength of the pull between the two models")
    personal_lr: Number = number(0.09, above=0, doc="learning rate of the inner steps")
    inner_steps: int = whole(5, low=1, doc="inner steps per batch")
    inner_start: str = choice("continue", "restart", doc="continue, or restart at the common model")

    @property
    def gradients_per_step(self) -> int:
        return self.inner_steps

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        # Common model, inner iterate, and the personal model after the last batch.
        return context.params, context.params, context.params

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        common, theta, _ = scratch
        theta = theta - self.personal_lr * (grad + self.lam * (theta - common))
        return theta, (common, theta, theta)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        theta, (common, _, _) = self.next_point(context, params, scratch, grad)
        common = common - self.lr * self.lam * (common - theta)
        first = common if self.inner_start == "restart" else theta
        return first, (common, first, theta)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return Upload(context.params - scratch[0]), context.memory.replaced(scratch[2])


ALGORITHMS = (Algorithm("pfedme", PFedMe(), Average()),)
