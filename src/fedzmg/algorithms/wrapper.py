"""What wrappers share: they hold a rule and hand everything on that they do not change.

A wrapper acts on the gradient before the rule inside sees it, so the outermost wrapper acts first.
The order that is meant when several are used: clip, project, pull (proximal term), then the rule's
own correction, momentum, decay and step. Projection is linear, so projecting before or after a
control variate is the same as long as the variate is projected too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from fedzmg.contract import ClientRule, Given, Layout, Look, Looks, State, Upload
from fedzmg.tree import Tree


@dataclass(frozen=True)
class Wrapper(ClientRule):
    """A client rule around another; subclasses override what they change."""

    inner: ClientRule

    def for_layout(self, layout: Layout) -> Self:
        return replace(self, inner=self.inner.for_layout(layout))

    @property
    def looks(self) -> Looks:
        return self.inner.looks

    @property
    def watches_epochs(self) -> bool:
        return self.inner.watches_epochs

    def remember(self, params: Tree) -> State:
        return self.inner.remember(params)

    def begin(self, given: Given, look: Look | tuple[()]) -> State:
        return self.inner.begin(given, look)

    def step(self, given: Given, params: Tree, scratch: State, grad: Tree) -> tuple[Tree, State]:
        return self.inner.step(given, params, scratch, grad)

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        return self.inner.end_epoch(scratch, loss)

    def finish(
        self, given: Given, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        return self.inner.finish(given, params, scratch, steps)
