"""AFL (Mohri, Sivek, Suresh 2019): agnostic federated learning, for the worst mixture of clients.

The objective is ``min_w max_lambda sum_k lambda_k F_k(w)`` over mixtures lambda of all ``N``
clients. With ``S`` the cohort, ``F_k`` the mean loss of client k over all its data at the model it
received, and ``lambda_k = 1 / N`` at first::

    client:  w_k      <- w_k - lr g
    server:  w        <- w - server_lr mean over S of (w - w_k), weights lambda_k
             lambda_k <- lambda_k + mixture_lr F_k         for k in S
             lambda   <- nearest mixture to lambda

The step uses the lambda before its change. ``server.rule = "exponential"`` multiplies lambda_k by
``exp(mixture_lr F_k)`` and normalises instead, so that no entry ever becomes zero.
Travels down: the model. Travels up: the model difference and the loss, for which a client makes one
more pass over its data. Server state: lambda, one number per client. The method is meant for few
clients, below about 100.

Local training follows Ro et al. 2021; the paper has one local step and all clients in every round.
Sampled cohorts are our definition: the weights of a cohort are normalised, and are equal if all of
them are zero. ``server.sampled = "unbiased"`` takes ``N / |S| lambda_k`` as they are, and
``mixture_lr N / |S|``.
The theory is about the mean of all models so far: ``server.output = "mean"`` evaluates this mean
while training continues from the last model; it is then a part of the server state.
Degenerate cases: ``mixture_lr = 0`` is FedAvg with uniform weights.
"""

from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.algorithms.fedprox import LossFirst
from fedzmg.contract import Algorithm, Number, ServerRule, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import known


def nearest_mixture(values: Tensor) -> Tensor:
    """Project a vector onto the vectors that are not negative and sum to one."""
    high = values.sort(descending=True).values
    count = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    inside = high + (1 - high.cumsum(0)) / count > 0
    shift = (1 - torch.where(inside, high, 0).sum()) / inside.sum()
    return (values + shift).clamp(min=0)


@rule_class
class WithLoss(LossFirst):
    """Any client rule that also sends the loss at the model it received."""

    pairing = "afl"

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        return upload._replace(each=scratch[0]), memory


class Mixture(NamedTuple):
    """Server state: weights of all clients; for a mean of models the last model and their count."""

    weights: Tensor
    params: Any
    models: Any


@rule_class
class Agnostic(ServerRule):
    """The average by the mixture of clients, which moves towards large losses."""

    pairing = "afl"
    only_weights = "uniform"
    needs = frozenset({"client"})
    own_weights = True

    lr: Number = number(1.0, above=0, doc="server learning rate")
    mixture_lr: Number = number(0.01, low=0, doc="learning rate of the mixture")
    rule: str = choice("project", "exponential", doc="change of the mixture: projected, or factors")
    sampled: str = choice("normalized", "unbiased", doc="weights sum to one, or only on average")
    output: str = choice("last", "mean", doc="model that is kept: the last, or the mean of all")
    population: int | None = field(default=None, repr=False, metadata={"derived": True})
    """Number of clients, once the task is known."""

    def init(self, params: Tree) -> Mixture:
        zero, number = next(iter(params.values())).new_zeros(()), known(self, self.population)
        weights = torch.ones_like(zero).expand(number) / number
        return Mixture(weights, *((params, zero) if self.output == "mean" else ((), ())))

    def send(self, params: Tree, state: Mixture) -> Tree:
        sent: Tree = state.params if self.output == "mean" else params
        return sent

    def weigh(self, state: Mixture, clients: Tensor, weights: Tensor) -> Tensor:
        own = torch.where(weights > 0, state.weights.gather(0, clients).to(weights.dtype), 0)
        return torch.where(own.sum() > 0, own, weights)

    def update(self, params: Tree, state: Mixture, cohort: Cohort) -> tuple[Tree, Mixture]:
        mixture, delta, rate = state.weights, cohort.delta, self.mixture_lr
        valid = cohort.valid.to(mixture.dtype)
        if self.sampled == "unbiased":
            factor = cohort.population / cohort.size.clamp(min=1)
            delta = delta * (factor * (mixture.gather(0, cohort.clients) * valid).sum())
            rate = rate * factor
        gain = rate * torch.where(cohort.valid, cohort.each, 0).to(mixture.dtype)
        if self.rule == "project":
            mixture = nearest_mixture(mixture.scatter_add(0, cohort.clients, gain))
        else:
            least = torch.finfo(mixture.dtype).tiny
            mixture = mixture.clamp(min=least).log().scatter_add(0, cohort.clients, gain).softmax(0)
        after = self.send(params, state) - self.lr * delta
        if self.output == "last":
            return after, Mixture(mixture, (), ())
        models = state.models + 1
        return params + (after - params) / models, Mixture(mixture, after, models)


ALGORITHMS = (Algorithm("afl", WithLoss(SGD(lr=0.1)), Agnostic(), weights="uniform"),)
