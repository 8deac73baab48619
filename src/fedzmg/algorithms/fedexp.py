"""FedExP (Jhunjhunwala, Wang, Joshi 2023): a server learning rate that follows the updates.

With ``D = sum_k p_k (w - w_k)`` and norms over all parameters together::

    client:  w_k <- w_k - lr g
    server:  rate <- max(1, sum_k p_k |w - w_k|^2 / (2 (|D|^2 + eps)))
             w    <- w - rate D

Travels down: the model. Travels up: the model difference. Weights are uniform.
Results are those of the mean of the last two models, as in the authors' code, while training
continues from the last; ``server.output = "last"`` evaluates the last model. Server state: the
model that is sent, only for this mean, and a scalar.

``eps`` falls with the square of a scheduled client learning rate, as in the authors' code.
``server.eps_scale = "cohort"`` multiplies it by the size of the cohort, which that code does and
the paper does not. ``server.highest`` bounds the learning rate; nothing like it is published.
Differences from the authors' code: weights are uniform by default, there they are examples.
Degenerate cases: FedAvg as long as the ratio is at most 1, so for one client, for equal updates and
for a huge ``eps``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD
from fedzmg.contract import Algorithm, ClientRule, Number, ServerRule, choice, number, rule_class
from fedzmg.messages import ClientContext, Cohort, Result, Upload
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import PartsAware, rate_of


def squared_norm(tree: Tree, personal: tuple[str, ...] | None = None) -> Tensor:
    """Return the squared Euclidean norm over all parameters together, but personal ones."""
    counted = [leaf for name, leaf in tree.items() if name not in (personal or ())]
    return torch.stack([leaf.square().sum() for leaf in counted]).sum()


def client_rate(rule: ClientRule, like: Tensor) -> Tensor:
    """Return the learning rate of a client rule as a tensor; 1 if it has none."""
    rate = rate_of(rule)
    return torch.ones_like(like) * (1.0 if rate is None else rate)


@rule_class
class WithNorm(PartsAware):
    """Any client rule; the server also sees the norm of its update and its learning rate."""

    pairing = "fedexp"

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = self.inner.finish(context, params, scratch, steps)
        norm = squared_norm(upload.delta, self.personal)
        return upload._replace(average=(norm, client_rate(self.inner, norm))), memory

    def wire(self, upload: Upload) -> State:
        return upload.delta


class Extrapolated(NamedTuple):
    """Server state: the model that is sent, and the first client learning rate."""

    params: Any
    rate: Tensor


@rule_class
class Extrapolate(ServerRule):
    """The average, extrapolated the more, the more the updates of clients differ."""

    pairing = "fedexp"

    eps: Number = number(1e-3, low=0, doc="added to the squared norm of the mean update")
    eps_scale: str = choice("one", "cohort", doc="factor of eps: 1, or the size of the cohort")
    highest: Number | None = number(None, low=1, doc="bound of the learning rate; absent: none")
    output: str = choice("last_two", "last", doc="kept model: mean of the last two, or the last")

    def init(self, params: Tree) -> Extrapolated:
        zero = next(iter(params.values())).new_zeros(())
        return Extrapolated(params if self.output == "last_two" else (), zero)

    def send(self, params: Tree, state: Extrapolated) -> Tree:
        sent: Tree = state.params if self.output == "last_two" else params
        return sent

    def update(self, params: Tree, state: Extrapolated, cohort: Cohort) -> tuple[Tree, State]:
        norm, rate = cohort.average
        first = torch.where(state.rate > 0, state.rate, rate)
        eps = self.eps * (rate / first) ** 2
        if self.eps_scale == "cohort":
            eps = eps * cohort.size
        factor = (norm / (2 * (squared_norm(cohort.delta) + eps))).nan_to_num(1.0).clamp(min=1)
        if self.highest is not None:
            factor = torch.minimum(factor, factor * 0 + self.highest)
        sent = self.send(params, state)
        after = sent - factor * cohort.delta
        if self.output == "last":
            return after, Extrapolated((), first)
        # The first round has no model before it to be averaged with.
        share = torch.where(state.rate > 0, 0.5, 0.0).to(norm.dtype)
        return after + share * (sent - after), Extrapolated(after, first)


ALGORITHMS = (Algorithm("fedexp", WithNorm(SGD(lr=0.1)), Extrapolate(), weights="uniform"),)
