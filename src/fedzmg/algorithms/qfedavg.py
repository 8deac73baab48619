"""q-FedAvg (Li et al. 2020): clients with a larger loss count more.

The objective is ``sum_k F_k^(q+1) / (q+1)``. With ``F_k`` the mean loss of client k over all its
data at the model it received, ``L = 1 / lr``, norms over all parameters together::

    client:  w_k <- w_k - lr g
    server:  u_k <- L (w - w_k) ;   h_k <- q F_k^(q-1) |u_k|^2 + L F_k^q
             w   <- w - sum_k F_k^q u_k / sum_k h_k

Both sums are divided by ``sum_k F_k^q`` here, so they are means with the weights ``F_k^q``; the
result is the same. Under a schedule ``L`` keeps the learning rate of the first round.
Travels down: the model, and the loss of the last cohort as a scalar, to which clients relate theirs
so that powers do not overflow. Travels up: the model difference and the loss, for which a client
makes one more pass over its data. Server state: two scalars.

The paper samples clients with probabilities ``p_k``, hence no weights in the sums;
``client.shares = "examples"`` puts the numbers of examples into both. As in the authors' code 1e-10
is added to losses. The upload of a client with a negative loss is dropped.
Degenerate cases: ``q = 0`` is FedAvg with uniform weights. For ``q -> inf`` only the client with
the largest loss counts, and steps become tiny.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedexp import client_rate, squared_norm
from fedzmg.algorithms.fedprox import LossFirst
from fedzmg.contract import Algorithm, Number, ServerRule, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Upload
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import PartsAware

FLOOR = 1e-10  # addend of every loss


@rule_class
class LossWeighted(LossFirst, PartsAware):
    """Any client rule whose upload counts by a power of the loss before training."""

    pairing = "qfedavg"

    q: Number = number(0.1, low=0, doc="power of the loss; 0: clients count alike")
    shares: str = choice("equal", "examples", doc="further factor of the weights")

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        loss = torch.where(scratch[0] < 0, torch.nan, scratch[0]) + FLOOR
        # Only ratios count; those to the last loss neither overflow nor vanish.
        weight = (loss / context.shared) ** self.q
        if self.shares == "examples":
            weight = weight * context.num_examples
        damping = self.q * squared_norm(upload.delta, self.personal) / loss
        average = damping, loss, client_rate(self.inner, loss)
        return upload._replace(average=average, weight=weight), memory

    def wire(self, upload: Upload) -> State:
        return upload.delta, upload.average[1]


class Scales(NamedTuple):
    """Server state: the first client learning rate, and the loss of the last cohort."""

    rate: Tensor
    loss: Tensor


@rule_class
class FairAverage(ServerRule):
    """The loss-weighted average, damped where updates are large for their loss."""

    pairing = "qfedavg"
    only_weights = "uniform"

    def init(self, params: Tree) -> Scales:
        zero = next(iter(params.values())).new_zeros(())
        return Scales(zero, zero + 1)

    def share(self, state: Scales) -> Tensor:
        return state.loss

    def update(self, params: Tree, state: Scales, cohort: Cohort) -> tuple[Tree, Scales]:
        damping, loss, rate = cohort.average
        first = torch.where(state.rate > 0, state.rate, rate)
        return params - cohort.delta / (1 + damping / first), Scales(first, loss)


ALGORITHMS = (Algorithm("qfedavg", LossWeighted(SGD(lr=0.1)), FairAverage(), weights="uniform"),)
