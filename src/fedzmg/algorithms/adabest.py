"""AdaBest (Varno et al. 2022): bias estimates that fade while a client is away.

With rounds ``t`` counted from 1, ``t_i`` the last round of client i (0 if none), ``h_i = 0`` at
first, and ``wbar`` the mean of the cohort's models, which begins as the initial model::

    client:  x    <- x - lr (g - h_i)                            from x = w, to x_i
             h_i  <- h_i / (t - t_i) + mu (w - x_i) ;   t_i <- t
    server:  wbar <- mean over the cohort of x_i
             w    <- wbar - beta (wbar_before - wbar)

Travels down: the model. Travels up: the model difference. Client state: h_i, and t_i as a scalar.
Server state: wbar. Weights are uniform. The size of the population is not needed.

Two models exist: the cloud model ``w``, which is sent, kept and evaluated here, and ``wbar``, which
the server state holds. A reported result is that of ``w``.

Defaults: the authors' library moved from (mu, beta) = (0.02, 0.98) over (0.1, 0.8) to (0.1, 0.85).
``beta = 0.8`` is the most cautious of them: the first round extrapolates by ``1 + beta``, which
overshoots at large client learning rates. Both are worth tuning.

Differences from that library: it multiplies by mu where ``h_i`` is used, together with a factor for
the steps done; for clients of equal size the two forms agree up to that constant.
Degenerate cases: ``mu = beta = 0`` is FedAvg with uniform weights; a client that was never drawn
has no correction, and one that returns after a gap keeps a fraction of its estimate.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.contract import Algorithm, ClientRule, Number, ServerRule, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Stepped, Upload
from fedzmg.tree import State, Tree


class Bias(NamedTuple):
    """Client memory: the estimate of its own drift, and the round that made it."""

    estimate: Tree
    round: Tensor


@rule_class
class AdaBest(ClientRule):
    """SGD along the gradient minus the client's bias estimate."""

    pairing = "adabest"
    corrects = True

    lr: Number = number(0.1, above=0, doc="client learning rate")
    mu: Number = number(0.1, low=0, doc="weight of a round's drift in the bias estimate")

    def init_memory(self, params: Tree) -> Bias:
        never = next(iter(params.values())).new_zeros((), dtype=torch.int64)
        return Bias(params.zeros(), never)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return params - self.lr * (grad - context.memory.estimate), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        old: Bias = context.memory
        delta = context.params - params
        estimate = old.estimate / (context.round - old.round) + self.mu * delta
        return Upload(delta), Bias(estimate, context.round)


@rule_class
class AdaBestServer(ServerRule):
    """The mean model, extrapolated by a share of its last change."""

    pairing = "adabest"

    beta: Number = number(0.8, low=0, below=1, doc="share of the mean model's change to add")

    def init(self, params: Tree) -> Tree:
        return params

    def update(self, params: Tree, state: Tree, cohort: Cohort) -> tuple[Tree, Tree]:
        mean = params - cohort.delta
        return mean - self.beta * (state - mean), mean


ALGORITHMS = (Algorithm("adabest", AdaBest(), AdaBestServer(), weights="uniform"),)
