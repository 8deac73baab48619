"""FLoRA (Wang et al. 2024): adapters are stacked, so that their products are averaged exactly.

For a model with adapters, ``W = W0 + s B A``, whose weights the server can move
(``fedzmg.models.add_lora(model, merge=True)``)::

    client:  A_k ~ U(-1/sqrt(n_in), 1/sqrt(n_in)), B_k <- 0      new in every round
             (A_k, B_k) <- (A_k, B_k) - lr g
    server:  W0 <- W0 + server_lr sum_k p_k s B_k A_k

Travels up: A_k and B_k, ``r (n_in + n_out)`` numbers of a layer with rank ``r``. Travels down: the
stacked factors of a cohort of K, ``K r (n_in + n_out)``, which every client merges. State: none.
The simulator sums products ``s B_k A_k`` and counts the bytes of the factors. An aggregator, too,
therefore sees products.

Differences from the paper: all clients have the same rank. A client that was not in the last
cohorts would need their stacks, too; they are not counted.
Degenerate case: in a model without adapters it is FedAvg.
"""

import math
from dataclasses import field, replace
from typing import Self

from torch import Tensor

from fedzmg.algorithms.fedavg import SGD, Average
from fedzmg.contract import Algorithm, Layout, Need, Parts, rule_class
from fedzmg.draw import uniform
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, FullPass, Result, Upload
from fedzmg.models.lora import Adapter, adapters, product
from fedzmg.tree import State, Tree
from fedzmg.wrappers import parts
from fedzmg.wrappers.parts import filled, pick
from fedzmg.wrappers.wrapper import ServerWrapper, StatefulWrapper


def _movable(layout: Layout) -> tuple[Adapter, ...]:
    """Return the adapters of a model, and reject one whose weight is constant."""
    found = tuple(adapters(layout))
    for adapter in found:
        if not adapter.weight:
            problem = f"FLoRA moves adapted weights, but that of {adapter.a!r} is a constant"
            raise InputError(f"{problem}: make the model with add_lora(..., merge=True)")
    return found


def _factors(known: tuple[Adapter, ...]) -> set[str]:
    return {name for adapter in known for name in (adapter.a, adapter.b)}


@rule_class
class MergeAdapters(StatefulWrapper):
    """Any client rule on new adapters, whose products are the update of the adapted weights."""

    pairing = "flora"

    adapters: tuple[Adapter, ...] = field(default=(), repr=False, metadata={"derived": True})

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs | {"key"}

    def for_layout(self, layout: Layout) -> Self:
        found, own = _movable(layout), super().for_layout(layout)
        if not found:
            return own
        # Without the weights: decay and momentum must not move them.
        split = Parts(frozen=tuple(adapter.weight for adapter in found)).split(layout)
        return replace(own, inner=parts.PartsClient(own.inner, split), adapters=found)

    def _fresh(self, context: ClientContext) -> Tree:
        first = Tree({adapter.a: context.params[adapter.a] for adapter in self.adapters})
        unit = uniform(context.key, first)
        drawn = unit.map(lambda u: (2 * u - 1) / math.sqrt(u.shape[1:].numel()))
        last = {adapter.b: context.params[adapter.b] for adapter in self.adapters}
        return Tree({**drawn, **Tree(last).zeros()})

    def seen(self, context: ClientContext, own: Tree) -> ClientContext:
        return context._replace(params=filled(own, context.params))

    def start(self, context: ClientContext) -> Tree:
        return self.inner.start(self.seen(context, self._fresh(context)))

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        fresh = self._fresh(context)
        return fresh, self.inner.begin(self.seen(context, fresh), full_pass)

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        upload, memory = super().finish(context, params, scratch, steps)
        own = self.adapters
        products = {one.weight: -one.scale * product(params[one.a], params[one.b]) for one in own}
        known = {**upload.delta, **pick(params, _factors(self.adapters)).zeros(), **products}
        return upload._replace(delta=Tree({name: known[name] for name in context.params})), memory

    def wire(self, upload: Upload) -> State | int:
        # The zeros in place of the factors have their size.
        sent = pick(upload.delta, set(upload.delta) - {adapter.weight for adapter in self.adapters})
        return self.inner.wire(upload._replace(delta=sent))


@rule_class
class StackAdapters(ServerWrapper):
    """Any server rule that sends the stacked factors of a cohort in place of adapted weights."""

    pairing = "flora"

    adapters: tuple[Adapter, ...] = field(default=(), repr=False, metadata={"derived": True})

    def for_layout(self, layout: Layout) -> Self:
        return replace(super().for_layout(layout), adapters=_movable(layout))

    def wire(self, params: Tree, clients: int) -> State:
        factors = pick(params, _factors(self.adapters))
        weights = {adapter.weight for adapter in self.adapters}
        others = pick(params, set(params) - weights - set(factors))
        return self.inner.wire(others, clients), (factors,) * clients


ALGORITHMS = (Algorithm("flora", MergeAdapters(SGD()), StackAdapters(Average())),)
