"""FedAvg (McMahan et al. 2017): local SGD, example-weighted averaging.

::

    client:  w_k <- w_k - lr g                       (momentum and decay as options)
    server:  w   <- w - server_lr sum_k p_k (w - w_k)

Travels down: the model. Travels up: the model difference. State: none.
``fedavg:momentum`` has FedZMG's momentum 0.9 and decoupled decay 0.0005: the two differ by the
projection alone.
Degenerate cases: ``server.lr = 1`` makes the new model the weighted mean of the clients' models.
"""

from dataclasses import field, replace
from typing import Self

from fedzmg.contract import Algorithm, ClientRule, ServerRule
from fedzmg.messages import ClientContext, Cohort, FullPass, Stepped
from fedzmg.rule import Layout, Number, choice, number, rule_class
from fedzmg.tree import State, Tree, add_scaled
from fedzmg.wrappers.wrapper import known


@rule_class
class SGD(ClientRule):
    """Local stochastic gradient descent.

    Per step::

        v <- momentum v + g              (accumulating form; v = 0 at the start of every round)
        w <- w (1 - decay lr) - lr v     (heavy_ball; decoupled: the decay never enters v)
        w <- w (1 - decay lr) - lr (g + momentum v)                                  (nesterov)

    Both forms are those of ``torch.optim.SGD``; its weight decay, however, enters the gradient.
    Degenerate cases: ``momentum=0`` equals no momentum, whatever the form, and ``decay=0`` equals
    no decay, bit for bit.
    """

    lr: Number = number(0.1, above=0, doc="client learning rate")
    momentum: Number | None = number(None, low=0, below=1, doc="accumulating momentum")
    decay: Number | None = number(None, low=0, doc="decoupled weight decay, times lr per step")
    decay_scope: str = choice("all", "kernels", doc="decay of all, or of all but biases and norms")
    form: str = choice("heavy_ball", "nesterov", doc="form of the momentum")
    spared: tuple[str, ...] | None = field(default=None, repr=False, metadata={"derived": True})
    """Names of the parameters that do not decay, once the model is known."""

    def for_layout(self, layout: Layout) -> Self:
        if self.decay_scope == "all":
            return self
        spared = tuple(name for name, info in layout.items() if info.role in ("bias", "norm"))
        return replace(self, spared=spared)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return () if self.momentum is None else context.params.zeros()

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree, *out: Tree
    ) -> Stepped:
        if self.momentum is not None:
            scratch = add_scaled(grad, self.momentum, scratch, *(scratch for _ in out))
            grad = grad + self.momentum * scratch if self.form == "nesterov" else scratch
        if self.decay is not None:
            params = self._decayed(params, 1 - self.decay * self.lr)
        return add_scaled(params, -self.lr, grad, *out), scratch

    def _decayed(self, params: Tree, kept: Number) -> Tree:
        if self.decay_scope == "all":
            return params * kept
        spared = known(self, self.spared)
        return Tree({n: w if n in spared else w * kept for n, w in params.items()})


@rule_class
class Average(ServerRule):
    """Move the model along the averaged client update: ``w <- w - lr delta``."""

    lr: Number = number(1.0, above=0, doc="server learning rate")

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return params - self.lr * cohort.delta, state


ALGORITHMS = (
    Algorithm("fedavg", SGD(lr=0.1), Average()),
    Algorithm("fedavg:momentum", SGD(lr=0.1, momentum=0.9, decay=0.0005), Average()),
)
