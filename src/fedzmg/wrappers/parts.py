"""Wrappers for personal and frozen parts of a model; the rules inside see only trained parameters.

A client trains its personal parameters together with the shared ones, keeps them in its memory and
uploads the shared ones alone. Frozen parameters keep their initial values: they are no part of any
gradient, momentum or decay. A client that was never sampled has the initial personal parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor

from fedzmg.contract import Algorithm, Layout, Parts, chain
from fedzmg.messages import BatchOutputs, ClientContext, Cohort, FullPass, Result, Stepped, Upload
from fedzmg.parts import Split
from fedzmg.tree import State, Tree, map_trees
from fedzmg.wrappers.wrapper import ServerWrapper, Wrapper


def fit(algorithm: Algorithm, layout: Layout, parts: Parts, population: int) -> Algorithm:
    """Return an algorithm whose rules know a model's layout and its parts; a task may add some."""
    fitted, parts = algorithm.for_layout(layout, population), algorithm.parts | parts
    if not parts:
        return fitted
    split = parts.split(layout)
    client = PartsClient(fitted.client.for_parts(split.personal), split)
    return replace(fitted, client=client, server=PartsServer(fitted.server, split))


def pick(tree: Tree, names: Iterable[str]) -> Tree:
    """Return some tensors of a tree, in its order; an empty tree stays empty."""
    return Tree({name: leaf for name, leaf in tree.items() if name in names})


def filled(part: Tree, full: Tree) -> Tree:
    """Return a full tree with some of its tensors replaced."""
    return Tree({name: part.get(name, leaf) for name, leaf in full.items()})


@final
@dataclass(frozen=True)
class PartsClient(Wrapper):
    """Any client rule, on a model with personal and frozen parts."""

    split: Split = field(metadata={"derived": True})

    wrapper_kind = "parts"

    @property
    def is_personal(self) -> bool:
        return bool(self.split.personal) or self.inner.is_personal

    def _trained(self, tree: Tree) -> Tree:
        return pick(tree, (*self.split.shared, *self.split.personal))

    def _inside(self, context: ClientContext) -> ClientContext:
        """Return the context of the rule inside.

        Personal parameters are zero in shared values, and in corrections relative to these.
        """
        personal, memory = context.memory
        params, zeros = filled(personal, self._trained(context.params)), personal.zeros()

        def extended(tree: Tree) -> Tree:
            if set(tree) != set(self.split.shared):
                return tree
            return Tree({name: {**tree, **zeros}[name] for name in params})

        def corrected(tree: Tree) -> Tree:
            return filled(zeros, tree) if set(tree) == set(params) else tree

        if any(rule.corrects for rule in chain(self.inner)):
            memory = map_trees(corrected, memory)
        shared = map_trees(extended, context.shared)
        return context._replace(params=params, memory=memory, shared=shared)

    def init_memory(self, params: Tree) -> State:
        trained = self._trained(params)
        return pick(trained, self.split.personal), self.inner.init_memory(trained)

    def start(self, context: ClientContext) -> Tree:
        return filled(self.inner.start(self._inside(context)), context.params)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        if isinstance(full_pass, FullPass):
            full_pass = full_pass._replace(grad=self._trained(full_pass.grad))
        return self.inner.begin(self._inside(context), full_pass)

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        models = self.inner.references(self._inside(context))
        return tuple(filled(model, context.params) for model in models)

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        return self.inner.loss(self._inside(context), batch)

    def next_point(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> Stepped:
        own = self._inside(context), self._trained(params), scratch, self._trained(grad)
        point, scratch = self.inner.next_point(*own)
        return filled(point, params), scratch

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own = self._inside(context), self._trained(params), scratch, self._trained(grad)
        moved, scratch = self.inner.step(*own)
        return filled(moved, params), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        trained = self._trained(params)
        upload, memory = self.inner.finish(self._inside(context), trained, scratch, steps)

        def without_personal(tree: Tree) -> Tree:
            return pick(tree, self.split.shared) if set(tree) == set(trained) else tree

        travels: Upload = map_trees(without_personal, upload)
        return travels, (pick(trained, self.split.personal), memory)

    def personal_model(self, params: Tree, memory: State) -> Tree:
        personal, inside = memory
        own = filled(personal, self._trained(params))
        return filled(self.inner.personal_model(own, inside), params)


@final
@dataclass(frozen=True)
class PartsServer(ServerWrapper):
    """Any server rule, on the shared part of a model."""

    split: Split = field(metadata={"derived": True})

    def _shared(self, tree: Tree) -> Tree:
        return pick(tree, self.split.shared)

    def init(self, params: Tree) -> State:
        return self.inner.init(self._shared(params))

    def send(self, params: Tree, state: State) -> Tree:
        return filled(self.inner.send(self._shared(params), state), params)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        moved, state = self.inner.update(self._shared(params), state, cohort)
        return filled(moved, params), state


def travelling(rule: Any, params: Tree) -> Tree:
    """Return the parameters that travel between this rule's side and the other one."""
    parts = isinstance(rule, PartsClient | PartsServer)
    return pick(params, rule.split.shared) if parts else params
