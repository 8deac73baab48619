"""Wrappers for personal and frozen parts of a model; the rules inside see only trained parameters.

A client trains its personal parameters together with the shared ones, keeps them in its memory and
uploads the shared ones alone. Frozen parameters keep their initial values: they are no part of any
gradient, momentum or decay. A client that was never sampled has the initial personal parameters.

Running statistics arrive in place of a gradient, once per step: with the first gradient of a batch.
They travel as a difference, like shared parameters, and their mean is added whatever the server
rule is; those of personal layers stay in the client's memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from fedzmg.contract import Algorithm, Layout, Parts, chain, rule_class
from fedzmg.messages import BatchOutputs, ClientContext, Cohort, FullPass, Result, Stepped, Upload
from fedzmg.parts import Split
from fedzmg.tree import State, Tree, map_trees, num_bytes
from fedzmg.wrappers.wrapper import ServerWrapper, Wrapper


def fit(algorithm: Algorithm, layout: Layout, parts: Parts, population: int) -> Algorithm:
    """Return an algorithm whose rules know a model's layout and its parts; a task may add some."""
    trained = {name: info for name, info in layout.items() if not info.is_buffer}
    fitted, parts = algorithm.for_layout(trained, population), algorithm.parts | parts
    if not parts and len(trained) == len(layout):
        return fitted
    split = parts.split(layout)
    client = fitted.client.for_parts(split.personal) if parts else fitted.client
    server = PartsServer(fitted.server, split)
    return replace(fitted, client=PartsClient(client, split), server=server)


def pick(tree: Tree, names: Iterable[str]) -> Tree:
    """Return some tensors of a tree, in its order; an empty tree stays empty."""
    chosen = frozenset(names)
    return Tree({name: leaf for name, leaf in tree.items() if name in chosen})


def filled(part: Tree, full: Tree) -> Tree:
    """Return a full tree with some of its tensors replaced."""
    own = dict(part.items())
    return Tree({name: own.get(name, leaf) for name, leaf in full.items()})


@rule_class
class PartsClient(Wrapper):
    """Any client rule, on a model with personal and frozen parts."""

    split: Split = field(metadata={"derived": True})

    wrapper_kind = "parts"

    @property
    def is_personal(self) -> bool:
        return bool(self.split.personal or self.split.own) or self.inner.is_personal

    def _trained(self, tree: Tree) -> Tree:
        return pick(tree, (*self.split.shared, *self.split.personal))

    def _kept(self, tree: Tree) -> Tree:
        return pick(tree, (*self.split.personal, *self.split.own))

    def _statistics(self, tree: Tree) -> Tree:
        return pick(tree, (*self.split.averaged, *self.split.own))

    def _inside(self, context: ClientContext) -> ClientContext:
        """Return the context of the rule inside; personal shared values and corrections are 0."""
        personal, memory = context.memory
        if not personal:
            return context._replace(params=self._trained(context.params), memory=memory)
        params, zeros = filled(personal, self._trained(context.params)), personal.zeros()

        def extended(tree: Tree) -> Tree:
            if set(tree) != set(self.split.shared):
                return tree
            return Tree({name: {**tree, **zeros}[name] for name in params})

        if any(rule.corrects for rule in chain(self.inner)):
            memory = map_trees(lambda t: filled(zeros, t) if set(t) == set(params) else t, memory)
        shared = map_trees(extended, context.shared)
        return context._replace(params=params, memory=memory, shared=shared)

    def init_memory(self, params: Tree) -> State:
        return self._kept(params), self.inner.init_memory(self._trained(params))

    def start(self, context: ClientContext) -> Tree:
        own = filled(context.memory[0], context.params)
        return filled(self.inner.start(self._inside(context)), own)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        if isinstance(full_pass, FullPass):
            full_pass = full_pass._replace(grad=self._trained(full_pass.grad))
        inside = self.inner.begin(self._inside(context), full_pass)
        if self.gradients_per_step == 1 or not (self.split.averaged or self.split.own):
            return (inside,)
        # Statistics arrive before the step: the state also holds them, and flags them as new.
        return inside, self._statistics(context.params), torch.zeros_like(context.round)

    def references(self, context: ClientContext) -> tuple[Tree, ...]:
        own = filled(context.memory[0], context.params)
        return tuple(filled(model, own) for model in self.inner.references(self._inside(context)))

    def loss(self, context: ClientContext, batch: BatchOutputs) -> Tensor:
        return self.inner.loss(self._inside(context), batch)

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        inside, *waiting = scratch
        own = self._inside(context), self._trained(params), inside, self._trained(grad)
        point, inside = self.inner.next_point(*own)
        arrived = self._first(waiting, grad) if waiting else ()
        return filled(point, params), (inside, *arrived)

    def _first(self, waiting: Sequence[Any], grad: Tree) -> tuple[Tree, Tensor]:
        """Return the statistics of a batch's first gradient."""
        before, arrived = waiting
        new = self._statistics(grad)
        kept = {n: torch.where(arrived > 0, before[n], leaf) for n, leaf in new.items()}
        return Tree(kept), torch.ones_like(arrived)

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree, *out: Tree
    ) -> Stepped:
        inside, *waiting = scratch
        own = self._inside(context), self._trained(params), inside, self._trained(grad)
        moved, inside = self.inner.step(*own, *map(self._trained, out))
        statistics = self._statistics(grad)
        if waiting:
            statistics, arrived = self._first(waiting, grad)
            waiting = [statistics, torch.zeros_like(arrived)]
        return filled(moved, filled(statistics, params)), (inside, *waiting)

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        inside, *waiting = scratch
        inside, continues = self.inner.end_epoch(inside, loss)
        return (inside, *waiting), continues

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        trained = self._trained(params)
        upload, memory = self.inner.finish(self._inside(context), trained, scratch[0], steps)
        shared, whole = self.split.shared, set(trained)  # without personal parameters
        travels: Upload = map_trees(lambda t: pick(t, shared) if set(t) == whole else t, upload)
        if averaged := self.split.averaged:
            moves = pick(context.params, averaged) - pick(params, averaged)
            delta = {**moves, **travels.delta}
            ordered = Tree({name: delta[name] for name in params if name in delta})
            travels = travels._replace(delta=ordered)
        return travels, (self._kept(params), memory)

    def wire(self, upload: Upload) -> State | int:
        if not self.split.averaged:
            return self.inner.wire(upload)
        moves = pick(upload.delta, self.split.averaged)
        sent = self.inner.wire(upload._replace(delta=pick(upload.delta, self.split.shared)))
        return sent + num_bytes(moves) if isinstance(sent, int) else (sent, moves)

    def personal_model(self, params: Tree, memory: State) -> Tree:
        kept, inside = memory
        own = filled(kept, self._trained(params))
        return filled(self.inner.personal_model(own, inside), filled(kept, params))


@rule_class
class PartsServer(ServerWrapper):
    """Any server rule, on the shared part of a model."""

    split: Split = field(metadata={"derived": True})

    def init(self, params: Tree) -> State:
        return self.inner.init(pick(params, self.split.shared))

    def send(self, params: Tree, state: State) -> Tree:
        return filled(self.inner.send(pick(params, self.split.shared), state), params)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        averaged = pick(params, self.split.averaged)
        if averaged:
            averaged = averaged - pick(cohort.delta, averaged)
            cohort = cohort._replace(delta=pick(cohort.delta, self.split.shared))
        moved, state = self.inner.update(pick(params, self.split.shared), state, cohort)
        # A small variance may round to less than nothing.
        known = {n: v.clamp(min=0) if n.endswith("running_var") else v for n, v in averaged.items()}
        known |= {n: known[n].round() for n in self.split.counts}
        return filled(moved, filled(Tree(known), params)), state


def travelling(rule: Any, params: Tree) -> Tree:
    """Return the parameters that travel between this rule's side and the other one."""
    if not isinstance(rule, PartsClient | PartsServer):
        return params
    return pick(params, (*rule.split.shared, *rule.split.averaged))
