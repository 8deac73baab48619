"""The client rule under most others: SGD with optional momentum and decoupled weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedzmg.contract import ClientRule, Given, Look, Number, State, number
from fedzmg.tree import Tree


@final
@dataclass(frozen=True)
class SGD(ClientRule):
    """Local stochastic gradient descent.

    Per step::

        v <- momentum v + g              (accumulating form; v = 0 at the start of every round)
        w <- w (1 - decay lr) - lr v     (decoupled: the decay never enters v)

    Degenerate cases: ``momentum=0`` equals no momentum, ``decay=0`` equals no decay, bit for bit.
    """

    lr: Number = number(0.1, above=0, doc="client learning rate")
    momentum: Number | None = number(None, low=0, below=1, doc="accumulating momentum")
    decay: Number | None = number(None, low=0, doc="decoupled weight decay, times lr per step")

    def begin(self, given: Given, look: Look | tuple[()]) -> State:
        del look
        return () if self.momentum is None else given.params.zeros()

    def step(self, given: Given, params: Tree, scratch: State, grad: Tree) -> tuple[Tree, State]:
        del given
        if self.momentum is not None:
            grad = scratch = self.momentum * scratch + grad
        if self.decay is not None:
            params = params * (1 - self.decay * self.lr)
        return params - self.lr * grad, scratch
