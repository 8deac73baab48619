"""FedCAda (Zhou et al. 2024), inferred: Adam on the clients, its moments averaged by the server.

With ``s`` the local steps done since the first round and ``r`` the round::

    client:  a <- m ;  b <- v ;  s_k <- s                          at the start of the round
             s_k <- s_k + 1
             a   <- beta1 a + (1 - beta1) g ;   b <- beta2 b + (1 - beta2) g^2
             A   <- a / (1 - beta1^s_k + psi(r)) ;   B <- b / (1 - beta2^s_k + psi(r))
             w_k <- w_k - lr A / (sqrt(B) + eps)
    server:  w, m, v, s <- weighted means of w_k, a, b, s_k        m = v = s = 0 at first

    psi(r):  none 0 ;   inverse_round 1 / r ;   exp e^-r

Travels down: the model, m, v and the scalar s. Travels up: the model difference, a, b and the
scalar s_k. Server state: m, v and s.

Inferred: only the abstract could be read. It says that clients run Adam, that the server averages
the model and both moments and sends them back, and that the denominators of the bias correction get
a term that damps the moments in early rounds and then fades. The term, the step count, averaging v
(not its root) and every default are our choice. With unequal numbers of steps the mean ``s`` need
not be whole.
Degenerate cases: one client alone with ``psi = none`` is one uninterrupted Adam.
``beta1 = beta2 = 0`` with ``psi = none`` steps by ``lr`` along the sign of the gradient, up to
``eps``.
"""

import torch
from torch import Tensor

from fedzmg.algorithms import moments
from fedzmg.algorithms.moments import AverageSharedState, Moments, SharedStateClient
from fedzmg.contract import Algorithm, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, Stepped
from fedzmg.tree import Tree


@rule_class
class SharedAdam(SharedStateClient):
    """Adam that continues from the server's moments, its bias correction damped by ``psi``."""

    pairing = "fedcada"

    lr: Number = number(1e-3, above=0, doc="client learning rate")
    beta1: Number = number(0.9, low=0, below=1, doc="decay of the first moment")
    beta2: Number = number(0.99, low=0, below=1, doc="decay of the second moment")
    eps: Number = number(1e-8, above=0, doc="added to the root of the second moment")
    psi: str = choice("inverse_round", "none", "exp", doc="damping of the bias correction")

    def step(self, context: ClientContext, params: Tree, scratch: Moments, grad: Tree) -> Stepped:
        after = moments.adam_moments(scratch, grad, self.beta1, self.beta2)
        damping: Tensor | float = 0.0
        if self.psi != "none":
            round_ = context.round.to(after.steps.dtype)
            damping = 1 / round_ if self.psi == "inverse_round" else torch.exp(-round_)
        # Factors, not divisors: a compiled step cannot divide a tree by a scalar tensor.
        of_mean = 1 / (1 - self.beta1**after.steps + damping)
        of_square = 1 / (1 - self.beta2**after.steps + damping)

        def moved(param: Tensor, first: Tensor, second: Tensor) -> Tensor:
            root = (second * of_square).sqrt_().add_(self.eps)
            return param - (first * of_mean).div_(root).mul_(self.lr)

        return params.map(moved, after.first, after.second), after


@rule_class
class AverageMoments(AverageSharedState):
    """The cohort's mean model, moments and step count."""

    pairing = "fedcada"

    def init(self, params: Tree) -> Moments:
        return moments.no_moments(params)


ALGORITHMS = (
    Algorithm("fedcada", SharedAdam(), AverageMoments()),
    Algorithm("fedcada:none", SharedAdam(psi="none"), AverageMoments()),
)
