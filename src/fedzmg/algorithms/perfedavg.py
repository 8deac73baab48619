"""Per-FedAvg (Fallah et al. 2020): a common start from which one step adapts to every client.

One meta step, each gradient on the next batch of the client::

    client:  u   <- w_k - alpha g(w_k)                     inner step
             w_k <- w_k - lr g(u)                          perfedavg (FO)
             w_k <- w_k - lr (g(u) - alpha d)              perfedavg:hf
             d    = (g(w_k + delta g(u)) - g(w_k - delta g(u))) / (2 delta)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none. Weights are uniform. A meta
step takes two batches (FO) or three (HF, with two gradients of the third). Batches left at the end
of a round are unused. Compare clients after fine-tuning, which takes ``alpha`` as learning rate.
Client learning-rate schedules scale ``lr`` alone.

Differences from the paper: a client with too few batches for a meta step takes plain steps.
Degenerate cases: ``alpha = 0`` is FedAvg on every second batch. On quadratic losses HF is exact.
"""

from typing import Any

import torch
from torch import Tensor

from fedzmg.algorithms.ditto import SEVERAL_POINTS
from fedzmg.algorithms.fedavg import Average
from fedzmg.contract import Algorithm, ClientRule, Number, choice, number, rule_class
from fedzmg.messages import ClientContext, FullPass, Result, Stepped
from fedzmg.tree import State, Tree


def _pick(choose: Tensor, new: Tree, old: Tree) -> Tree:
    return new.map(lambda a, b: torch.where(choose, a, b), old)


@rule_class
class PerFedAvg(ClientRule):
    """Meta steps: the gradient after an inner step moves the model."""

    incompatible = SEVERAL_POINTS
    needs = frozenset(("steps",))

    lr: Number = number(0.1, above=0, doc="learning rate of meta steps")
    alpha: Number = number(0.01, low=0, doc="learning rate of the inner step")
    delta: Number = number(1e-3, above=0, doc="length of the difference, in gradients (HF)")
    order: str = choice("first", "hessian_free", doc="second derivatives: none, or differences")

    @property
    def fine_tuning_rate(self) -> Number:
        """Return the learning rate of fine-tuning: that of the inner step."""
        return self.alpha

    @property
    def gradients_per_step(self) -> int:
        return 1 if self.order == "first" else 2

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        zero = torch.zeros_like(context.num_examples)
        if self.order == "first":
            return zero, context.params
        return zero, context.params, context.params.zeros(), context.params.zeros()

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        phase, anchor, slope, _ = scratch
        # The second gradient matters in the last phase only.
        return anchor - self.delta * slope, (phase, anchor, slope, grad)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        if self.order == "first":
            phase, anchor = scratch
            inner, moved = params - self.alpha * grad, anchor - self.lr * grad
            # While a client has too few batches, every phase is a plain step.
            first = (phase == 0) & (context.steps >= 2)
            after = _pick(first, inner, moved)
            return after, (torch.where(first, 1, 0), _pick(first, anchor, moved))
        phase, anchor, slope, grad1 = scratch
        few = context.steps < 3
        curved = (grad1 - grad) / (2 * self.delta)
        meta = anchor - self.lr * (slope - self.alpha * curved)
        plain = params - self.lr * grad1
        inner, probe = params - self.alpha * grad1, anchor + self.delta * grad1
        after = _pick(phase == 0, inner, _pick(phase == 1, probe, meta))
        anchor = _pick(few, plain, _pick(phase == 2, meta, anchor))
        phase = torch.where(few, 0, (phase + 1) % 3)
        return _pick(few, plain, after), (phase, anchor, _pick(phase == 2, grad1, slope), grad1)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        return super().finish(context, scratch[1], scratch, steps)


ALGORITHMS = (
    Algorithm("perfedavg", PerFedAvg(), Average(), weights="uniform"),
    Algorithm("perfedavg:hf", PerFedAvg(order="hessian_free"), Average(), weights="uniform"),
)
