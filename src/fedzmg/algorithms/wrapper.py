"""Base classes of wrappers, which hold a rule and forward what they do not change.

A client's wrapper acts on the gradient before the rule inside sees it, so the outermost wrapper
acts first. The order is: clip, project, pull (proximal term), then the rule's own correction,
momentum, decay and step. Projection is linear, so projecting before or after a control variate is
the same if the variate is projected too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Self

from torch import Tensor

from fedzmg.contract import (
    ClientContext,
    ClientRule,
    Cohort,
    FullPass,
    FullPassTiming,
    Layout,
    Number,
    Rule,
    ServerRule,
    State,
    Upload,
    chain,
)
from fedzmg.tree import Tree


def rate_of(rule: Rule) -> Number | None:
    """Return the ``lr`` of the outermost rule that has one."""
    rates = [r.lr for r in chain(rule) if any(f.name == "lr" for f in fields(r))]
    return rates[0] if rates else None


@dataclass(frozen=True)
class Wrapper(ClientRule):
    """A client rule around another; subclasses override what they change."""

    inner: ClientRule

    def for_layout(self, layout: Layout) -> Self:
        return replace(self, inner=self.inner.for_layout(layout))

    @property
    def full_pass(self) -> FullPassTiming:
        return self.inner.full_pass

    @property
    def uses_epoch_end(self) -> bool:
        return self.inner.uses_epoch_end

    def init_memory(self, params: Tree) -> State:
        return self.inner.init_memory(params)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        return self.inner.begin(context, full_pass)

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        return self.inner.step(context, params, scratch, grad)

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        return self.inner.end_epoch(scratch, loss)

    def finish(
        self, context: ClientContext, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        return self.inner.finish(context, params, scratch, steps)


class GradientWrapper(Wrapper):
    """A wrapper that changes every gradient: of a batch, and of a full pass."""

    @abstractmethod
    def changed(self, grad: Tree) -> Tree:
        """Return the gradient for the rule inside; empty in a full pass for the loss alone."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        seen = (
            full_pass._replace(grad=self.changed(full_pass.grad))
            if isinstance(full_pass, FullPass)
            else full_pass
        )
        return self.inner.begin(context, seen)

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        return self.inner.step(context, params, scratch, self.changed(grad))


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
