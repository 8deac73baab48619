"""Wrappers, which hold a rule and forward what they do not change; two for any server rule.

A client's wrapper acts on the gradient before the rule inside sees it, so the outermost wrapper
acts first. The order is: clip, project, pull (proximal term), then the rule's own correction,
momentum, decay and step. Projection is linear, so projecting before or after a control variate is
the same if the variate is projected too.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Self, TypeVar, get_args

from torch import Tensor

from fedzmg.contract import ClientRule, ServerRule
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext, Cohort, FullPass, Result, Stepped
from fedzmg.rule import Layout, Number, Rule, chain, choice, number, rule_class
from fedzmg.tree import State, Tree
from fedzmg.wrappers.projection import Axes, Biases, EmbeddingAxis, projected_axes, zero_mean

R = TypeVar("R", bound=Rule)
T = TypeVar("T")


def rate_of(rule: Rule) -> Number | None:
    """Return the ``lr`` of the outermost rule that has one."""
    return next((r.lr for r in chain(rule) if any(f.name == "lr" for f in fields(r))), None)


def known(rule: Rule, value: T | None) -> T:
    """Return a value that ``for_layout`` fills in."""
    if value is None:
        name = type(rule).__name__
        raise InputError(f"{name} does not know the model yet: call for_layout(layout) first")
    return value


def _forwarding(kind: type[R]) -> type[R]:
    """Forward what a wrapper inherits from its base, and does not define, to the rule inside."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            at = args and isinstance(args[0], ClientContext)
            return getattr(self.inner_at(args[0]) if at else self.inner, name)(*args)

        return call

    def attribute(name: str) -> property:
        return property(lambda self: getattr(self.inner, name))

    for name, value in vars(kind.__bases__[0]).items():
        if name[0] != "_" and name not in vars(kind):
            if isinstance(value, property):
                setattr(kind, name, attribute(name))
            elif callable(value):
                setattr(kind, name, method(name))
    return kind


@_forwarding
@dataclass(frozen=True)
class Wrapper(ClientRule):
    """A client rule around another; subclasses override what they change."""

    inner: ClientRule

    def inner_at(self, context: ClientContext) -> ClientRule:
        """Return the rule inside for a round."""
        return self.inner

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        return self.inner_at(context).step(context, params, scratch, grad)


@dataclass(frozen=True)
class PartsAware(Wrapper):
    """A wrapper that knows the names of personal parameters."""

    _: KW_ONLY
    personal: tuple[str, ...] | None = field(default=None, repr=False, metadata={"derived": True})

    def for_parts(self, personal: tuple[str, ...]) -> Self:
        return replace(super().for_parts(personal), personal=personal)


class StatefulWrapper(Wrapper):
    """A wrapper with a state of its own beside that of the rule inside: ``(own, inside)``."""

    def seen(self, context: ClientContext, own: State) -> ClientContext:
        """Return the context of the rule inside."""
        return context

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        own, inside = scratch
        point, inside = self.inner.next_point(self.seen(context, own), params, inside, grad)
        return point, (own, inside)

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        own, inside = scratch
        params, inside = self.inner.step(self.seen(context, own), params, inside, grad)
        return params, (own, inside)

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        own, inside = scratch
        inside, proceeds = self.inner.end_epoch(inside, loss)
        return (own, inside), proceeds

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        own, inside = scratch
        return self.inner.finish(self.seen(context, own), params, inside, steps)


class GradientWrapper(Wrapper):
    """A wrapper that changes every gradient: of a batch, and of a full pass."""

    @abstractmethod
    def changed(self, grad: Tree) -> Tree:
        """Return the gradient for the rule inside."""

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        if isinstance(full_pass, FullPass) and full_pass.grad:  # empty if for the loss alone
            full_pass = full_pass._replace(grad=self.changed(full_pass.grad))
        return self.inner.begin(context, full_pass)

    def next_point(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Stepped:
        return self.inner.next_point(context, params, scratch, self.changed(grad))

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree, *out: Tree
    ) -> Stepped:
        return self.inner.step(context, params, scratch, self.changed(grad), *out)


@_forwarding
@dataclass(frozen=True)
class ServerWrapper(ServerRule):
    """A server rule around another; subclasses override what they change."""

    inner: ServerRule

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        return self.inner.update(params, state, cohort)


@rule_class
class ServerDecay(ServerWrapper):
    """Any server rule with an ``lr``, and decoupled weight decay of the global model.

    ::

        w'  <- inner(w, updates)
        w   <- w' - decay server_lr w

    Decay on clients is a part of their updates: it enters the moments of an adaptive server, and a
    projected server undoes its effect on column sums. Here it is decoupled from both. A schedule
    around this rule scales the decay along with the learning rate.

    Degenerate cases: ``decay = 0`` is the rule inside, bit for bit. Around a step that conserves
    sums of columns, they shrink by ``1 - decay server_lr`` a round.
    """

    decay: Number = number(5e-4, low=0, doc="decoupled weight decay, times lr per round")

    def __post_init__(self) -> None:
        super().__post_init__()
        if rate_of(self.inner) is None:
            name = type(chain(self.inner)[-1]).__name__
            raise InputError(f"decay is measured in units of lr, which {name} does not have")
        if any(getattr(rule, "output", "last") != "last" for rule in chain(self.inner)):
            raise InputError("decay acts on the model that is kept: set server.output=last")

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        after, state = self.inner.update(params, state, cohort)
        rate = rate_of(self.inner)
        assert rate is not None, "checked by the constructor"
        return after - self.decay * rate * params, state


@rule_class
class Projected(ServerWrapper):
    """Any server rule, its final step centred over the inputs of every layer.

    ::

        w'  <- inner(w, updates)
        w   <- w + (w' - w) - mean(w' - w over the layer's inputs)       for every weight

    An element-wise preconditioner (Adam, Yogi, Adagrad) turns zero-mean updates into a step that is
    not zero-mean. The authors of Gradient Centralization (Yong et al. 2020) advise to centre the
    final step of adaptive optimisers, which keeps the mean of the weights.

    Degenerate cases: around a plain average it is Global GC. On clients without decay that already
    centre, it changes nothing around an average or server momentum. The sum of every column is
    conserved, so a decay of that sum on clients is undone.
    """

    axes: Axes | None = field(default=None, repr=False, metadata={"derived": True})
    embedding_axis: EmbeddingAxis = choice(*get_args(EmbeddingAxis), doc="embedding's input axis")
    biases: Biases = choice(*get_args(Biases), doc="biases: left alone, or centred too")

    def for_layout(self, layout: Layout) -> Self:
        axes = projected_axes(layout, "all", self.embedding_axis, self.biases)
        return replace(super().for_layout(layout), axes=axes)

    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        axes = known(self, self.axes)
        after, state = self.inner.update(params, state, cohort)

        def moved(name: str, leaf: Tensor) -> Tensor:
            if not axes[name]:
                return leaf  # subtracting and adding params would round
            return params[name] + zero_mean(leaf - params[name], axes[name])

        return Tree({name: moved(name, leaf) for name, leaf in after.items()}), state
