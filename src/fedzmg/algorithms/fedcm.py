"""FedCM (Xu et al. 2021): the last cohort's direction is mixed into every local step.

With ``K_k`` the steps of client k and ``m = 0`` at first::

    client:  w_k <- w_k - lr (alpha g + (1 - alpha) m)
    server:  m   <- mean_k (w - w_k) / (lr K_k)
             w   <- w - server_lr mean_k (w - w_k)

``m`` contains the share of the old ``m`` already. The learning rate is the one used in that round.
Travels down: the model and m. Travels up: the model difference, and K_k as a scalar; the server
computes m from both. Server state: m. Weights are uniform.

Differences from the paper: its global learning rate multiplies ``m``; it is
``server_lr lr K`` here. ``client.clip_norm`` bounds the gradient of the loss, not the mixed step.
Degenerate cases: ``alpha = 1`` is FedAvg with uniform weights. The first round moves by about
``alpha`` times FedAvg's update, exactly so for one local step.
"""

from torch import Tensor

from fedzmg.algorithms.moments import SharingServer
from fedzmg.contract import Algorithm, ClientRule, Number, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree


@rule_class
class FedCM(ClientRule):
    """SGD that mixes the server's direction into its gradients."""

    pairing = "fedcm"

    lr: Number = number(0.1, above=0, doc="client learning rate")
    alpha: Number = number(0.1, above=0, high=1, doc="share of the client's own gradient")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return params - self.lr * (self.alpha * grad + (1 - self.alpha) * context.shared), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        delta = context.params - params
        count = steps.clamp(min=1).to(next(iter(params.values())).dtype)
        return Upload(delta, average=(delta / self.lr / count, count)), context.memory

    def wire(self, upload: Upload) -> State:
        return upload.delta, upload.average[1]


@rule_class
class FedCMServer(SharingServer):
    """The mean model, and the mean direction of a step for the next cohort."""

    pairing = "fedcm"

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        return params - self.lr * cohort.delta, cohort.average[0]


ALGORITHMS = (Algorithm("fedcm", FedCM(), FedCMServer(), weights="uniform"),)
