"""What wrappers share: they hold a rule and hand everything on that they do not change.

A client's wrapper acts on the gradient before the rule inside sees it, so the outermost wrapper
acts first. The order that is meant when several are used: clip, project, pull (proximal term), then
the rule's own correction, momentum, decay and step. Projection is linear, so projecting before or
after a control variate is the same as long as the variate is projected too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor

from fedzmg.contract import (
    ClientRule,
    Cohort,
    Given,
    Layout,
    Look,
    Looks,
    Number,
    Rule,
    ServerRule,
    State,
    Upload,
    chain,
)
from fedzmg.tree import Tree


def rate_of(rule: Rule) -> Number | None:
    """The ``lr`` of the outermost rule that has one."""
    rates = [r.lr for r in chain(rule) if any(f.name == "lr" for f in fields(r))]
    return rates[0] if rates else None


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


class GradientWrapper(Wrapper):
    """A wrapper that changes every gradient of the loss: of a batch, and of a full pass."""

    @abstractmethod
    def changed(self, grad: Tree) -> Tree:
        """What the rule inside sees of a gradient; an empty one if only its loss was wanted."""

    def begin(self, given: Given, look: Look | tuple[()]) -> State:
        seen = look._replace(grad=self.changed(look.grad)) if isinstance(look, Look) else look
        return self.inner.begin(given, seen)

    def step(self, given: Given, params: Tree, scratch: State, grad: Tree) -> tuple[Tree, State]:
        return self.inner.step(given, params, scratch, self.changed(grad))


@dataclass(frozen=True)
class ServerWrapper(ServerRule):
    """A server rule around another; subclasses override what they change."""

    inner: ServerRule

    def for_layout(self, layout: Layout) -> Self:
        return replace(self, inner=self.inner.for_layout(layout))

    def init(self, params: Tree) -> State:
        return self.inner.init(params)

    def share(self, state: State) -> State:
        return self.inner.share(state)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return self.inner.update(params, state, cohort)
