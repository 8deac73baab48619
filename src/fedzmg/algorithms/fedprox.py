"""FedProx (Li et al. 2020): clients are pulled back to the model they received.

::

    client:  g   <- g + mu (w_k - w)                then the rule inside, here w_k <- w_k - lr g
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

``fedprox:adaptive`` lets the server choose ``mu`` from the cohort's loss ``f`` at the model that
was sent, as the paper's appendix proposes::

    mu <- mu + change    if f rose
    mu <- mu - change    if f fell in each of the last `patience` comparisons
    mu stays in [0, 1] and begins at `start`: 1 where clients differ, 0 where they are alike

Travels down: the model; adaptive also mu. Travels up: the model difference; adaptive also the loss,
for which a client makes one more pass over its data. Server state: none; adaptive keeps mu, the
last loss and the number of improvements in a row, all scalars.

Differences from the paper: the local problem is approached by the local steps, not to a given
accuracy. The pull enters the momentum buffer if the rule inside has one, because it is a part of
the gradient. Adaptive: under partial participation losses of different cohorts are compared. A
loss that is not lower resets the count of improvements, lowering mu does not: while the loss keeps
falling, mu falls every round.
Degenerate cases: ``mu = 0`` is FedAvg bit for bit, and so is one local step for every mu;
``change = 0`` makes the adaptive form FedProx with ``mu = start``. Inside ``ZeroMean`` the pull is
not projected, so that it acts on column sums too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Number, ServerRule, number, rule_class
from fedzmg.messages import ClientContext, Cohort, FullPass, FullPassTiming, Result, Stepped
from fedzmg.tree import State, Tree
from fedzmg.wrappers.wrapper import ServerWrapper, StatefulWrapper, Wrapper


@rule_class
class Prox(Wrapper):
    """Any client rule, pulled to the global model with a fixed strength."""

    wrapper_kind = "pull"

    mu: Number = number(0.01, low=0, doc="strength of the pull to the global model")

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        grad = grad + self.mu * (params - context.params)
        return self.inner.step(context, params, scratch, grad)


class LossFirst(StatefulWrapper):
    """A client rule around another that knows the loss at the model it received."""

    @property
    def full_pass(self) -> FullPassTiming:
        return "loss" if self.inner.full_pass == "never" else self.inner.full_pass

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        assert isinstance(full_pass, FullPass)
        wanted = () if self.inner.full_pass == "never" else full_pass
        return full_pass.loss, self.inner.begin(self.seen(context, ()), wanted)


@rule_class
class ServerSetProx(LossFirst):
    """Any client rule, pulled with the server's strength; uploads its loss before training."""

    wrapper_kind = "pull"
    pairing = "fedprox:adaptive"

    def seen(self, context: ClientContext, own: State) -> ClientContext:
        return context._replace(shared=context.shared[1])  # without mu

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        mu, _ = context.shared
        return super().step(context, params, scratch, grad + mu * (params - context.params))

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        return upload._replace(average=(scratch[0], upload.average)), memory


class Pull(NamedTuple):
    """Server state: the strength to send, and the inputs of its next change."""

    mu: Tensor
    loss: Tensor  # infinite before the first round: neither a rise nor an improvement can follow it
    improvements: Tensor
    inner: Any


@rule_class
class AdaptiveMu(ServerWrapper):
    """Any server rule that also raises and lowers the strength of its clients' pull."""

    pairing = "fedprox:adaptive"

    inner: ServerRule = Average()
    start: Number = number(1.0, low=0, high=1, doc="strength of the pull in the first round")
    change: Number = number(0.1, low=0, high=1, doc="by how much the strength moves")
    patience: Number = number(5.0, low=1, doc="improvements in a row that lower the strength")

    def init(self, params: Tree) -> Pull:
        zero = next(iter(params.values())).new_zeros(())
        return Pull(zero + self.start, zero + torch.inf, zero, self.inner.init(params))

    def share(self, state: Pull) -> State:
        return state.mu, self.inner.share(state.inner)

    def update(self, params: Tree, state: Pull, cohort: Cohort) -> tuple[Tree, Pull]:
        loss, average = cohort.average
        params, inner = self.inner.update(params, state.inner, cohort._replace(average=average))
        improved = (loss < state.loss) & state.loss.isfinite()
        improvements = torch.where(improved, state.improvements + 1, 0 * state.improvements)
        rises = (loss > state.loss).to(state.mu.dtype)
        falls = (improvements >= self.patience).to(state.mu.dtype)
        mu = (state.mu + self.change * (rises - falls)).clamp(0, 1)
        return params, Pull(mu, loss, improvements, inner)


ALGORITHMS = (
    Algorithm("fedprox", Prox(SGD(lr=0.1)), Average()),
    Algorithm("fedprox:adaptive", ServerSetProx(SGD(lr=0.1)), AdaptiveMu()),
)
