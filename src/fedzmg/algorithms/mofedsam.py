"""MoFedSAM (Qu et al. 2022): FedSAM whose local steps mix in the last cohort's direction.

With ``g2`` the second gradient of FedSAM and ``K_k`` the steps that a client did::

    client:  w_k <- w_k - lr (alpha g2 + (1 - alpha) m)    m is fixed in the round
    server:  m   <- mean_k (w - w_k) / (K_k lr)            m = 0 at first
             w   <- w - server_lr mean_k (w - w_k)

It is ``SAM`` around FedCM's clients, with FedCM's server. ``alpha``, the weight of the new
gradient, is the paper's beta; ``m`` is an average of gradients over about ``1 / alpha`` rounds.
The first round moves by ``alpha`` times a normal step, because m is zero. ``mofedsam:cold-start``
takes ``alpha = 1`` in that round.

Travels down: the model and m. Travels up: the model difference, and K_k as a scalar. Server state:
m. Weights are uniform.
Differences from the paper: it writes the server's step as ``eta_g m``, that is
``server_lr = eta_g / (K lr)``. Unequal numbers of steps and a learning rate that changes are taken
into account client by client; the FL-Simulator divides by the steps of the first client for all.
Degenerate cases: ``alpha = 1`` is FedSAM with equal weights; ``rho = 0`` is FedCM.
"""

from dataclasses import replace

import torch

from fedzmg.algorithms.fedcm import FedCM, FedCMServer
from fedzmg.algorithms.fedsam import SAM
from fedzmg.contract import Algorithm, rule_class
from fedzmg.messages import ClientContext, Stepped
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import Wrapper


@rule_class
class ColdStart(Wrapper):
    """FedCM's client that uses its own gradient alone in the first round."""

    inner: FedCM

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        one = next(iter(params.values())).new_ones(())
        alpha = torch.where(context.round == 1, one, one * self.inner.alpha)
        return replace(self.inner, alpha=alpha).step(context, params, scratch, grad)


ALGORITHMS = (
    Algorithm("mofedsam", SAM(FedCM()), FedCMServer(), weights="uniform"),
    Algorithm("mofedsam:cold-start", SAM(ColdStart(FedCM())), FedCMServer(), weights="uniform"),
)
