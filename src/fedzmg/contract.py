"""The contract between algorithms and engines; :mod:`fedzmg.messages` has the values they exchange.

An algorithm is a *client rule* and a *server rule*. A rule is a frozen dataclass: its fields are
its hyper-parameters, its methods are pure functions of trees. The same rule runs in a plain loop,
mapped over hundreds of clients, compiled, or in a deployed client; it never sees data, devices,
batches or other clients. Behaviour is added by wrapping a rule, never by subclassing one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedzmg.errors import InputError, unknown
from fedzmg.messages import ClientContext, Cohort, FullPass, FullPassTiming, Result, Stepped, Upload
from fedzmg.tree import State, Tree

Number: TypeAlias = float | Tensor
"""A hyper-parameter that may differ between trials trained together; a 0-d tensor inside an engine,
so it is used only arithmetically."""

Role = Literal["kernel", "recurrent_kernel", "embedding", "bias", "norm"]
Weights = Literal["examples", "uniform"]
WrapperKind = Literal["clip", "change", "project", "pull", "schedule"]
"""Effect of a wrapper on the rule inside: bound its gradients, change or project them, pull the
model somewhere, or change its numbers from round to round."""


class ParamInfo(NamedTuple):
    """Role and input axes of one parameter."""

    role: Role
    input_axes: tuple[int, ...]
    layer: str = ""
    """Type of the module that owns it, such as ``Conv2d``."""


Layout: TypeAlias = Mapping[str, ParamInfo]


def number(
    default: float | None,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    doc: str,
) -> Any:
    """Declare a rule's numeric field with its range: ``low <= x <= high``, ``above < x < below``.

    A default of ``None`` leaves the term out, which is cheaper than a zero and gives the same
    result bit for bit.
    """
    limits = {"low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"number": limits, "doc": doc})


def choice(*words: str, default: str | None = None, doc: str = "") -> Any:
    """Declare a rule's field that holds one of these words, by default the first."""
    chosen = words[0] if default is None else default
    return dataclasses.field(default=chosen, metadata={"words": words, "doc": doc})


def _range_text(limits: Mapping[str, float]) -> str:
    signs = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
    parts = [f"{sign} {limits[k]:g}" for k, sign in signs.items() if math.isfinite(limits[k])]
    return "a finite number" + (" " + " and ".join(parts) if parts else "")


class Rule:
    """Base of client and server rules: checked fields and a layout."""

    pairing: ClassVar[str] = ""
    """Name shared by client and server rules that work only with each other."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            limits, words = field.metadata.get("number"), field.metadata.get("words")
            value = getattr(self, field.name)
            if words is not None and value not in words:
                raise unknown(field.name, str(value), words)
            absent = value is None and field.default is None
            if limits is None or absent or isinstance(value, Tensor):
                continue
            if isinstance(value, Real) and not isinstance(value, bool):
                # NumPy numbers become Python numbers: options are compared, shown and stored.
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, field.name, value)
                closed = limits["low"] <= value <= limits["high"]
                finite = abs(value) <= sys.float_info.max  # of any number of digits
                if closed and limits["above"] < value < limits["below"] and finite:
                    continue
            raise InputError(f"{field.name} = {value!r}: expected {_range_text(limits)}")

    def for_layout(self, layout: Layout) -> Self:
        """Return this rule with the roles and input axes of a model's parameters."""
        inner = {name: rule.for_layout(layout) for name, rule in inner_rules(self).items()}
        return dataclasses.replace(self, **inner) if inner else self  # type: ignore[type-var]


class ClientRule(Rule, ABC):
    """Base of client rules. Only :meth:`step` is abstract."""

    wrapper_kind: ClassVar[WrapperKind] = "change"
    """Effect on the rule inside, if this is a wrapper; decides the order of wrappers."""
    incompatible: ClassVar[Mapping[WrapperKind, str]] = MappingProxyType({})
    """Kinds of wrappers that must not be put around it, each with the reason."""

    @property
    def full_pass(self) -> FullPassTiming:
        """Return the full passes over its own data that the client needs."""
        return "never"

    @property
    def uses_epoch_end(self) -> bool:
        """Tell the engine to call :meth:`end_epoch`."""
        return False

    def init_memory(self, params: Tree) -> State:
        """Return the memory of a client that was never sampled before."""
        return ()

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        """Return the state of one local training; ``full_pass`` is ``()`` unless asked for."""
        return ()

    @abstractmethod
    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Stepped:
        """Take one local step: the equations of the algorithm."""

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        """Update the state after a local epoch; the second value is false to stop training."""
        return scratch, True

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Result:
        """Return the upload, and the memory until the client is sampled again."""
        return Upload(context.params - params), context.memory


class ServerRule(Rule, ABC):
    """Base of server rules. Only :meth:`update` is abstract."""

    only_weights: ClassVar[Weights | None] = None
    """The only weighting for which its equations are right, if there is one."""

    def init(self, params: Tree) -> State:
        """Return the server state before the first round."""
        return ()

    def share(self, state: State) -> State:
        """Return what is sent to the clients besides the model."""
        return ()

    @abstractmethod
    def update(self, params: Tree, state: State, cohort: Cohort) -> tuple[Tree, State]:
        """Return the next global model and server state."""


@dataclass(frozen=True)
class Algorithm:
    """A client rule, a server rule, and the weights of clients when uploads are averaged."""

    name: str
    client: ClientRule
    server: ServerRule
    weights: Weights = "examples"

    def __post_init__(self) -> None:
        if self.weights not in ("examples", "uniform"):
            raise unknown("weights", str(self.weights), ["examples", "uniform"])
        try:
            _check_rule("client", self.client, ClientRule)
            _check_rule("server", self.server, ServerRule)
            _check_pairing(self.client, self.server)
            _check_wrappers(self.client)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from None
        for rule in chain(self.server):
            needed = getattr(rule, "only_weights", None)
            if needed is not None and self.weights != needed:
                raise InputError(f"{self.name}: weights = {self.weights!r}: it needs {needed!r}")

    def for_layout(self, layout: Layout) -> Algorithm:
        """Return a copy whose rules know a model's layout."""
        return dataclasses.replace(
            self, client=self.client.for_layout(layout), server=self.server.for_layout(layout)
        )

    def options(self) -> dict[str, Any]:
        """Return every option by key, such as ``{"client.lr": 0.1, "weights": "examples"}``."""
        fields = self.fields().items()
        return {"weights": self.weights} | {k: getattr(rule, f.name) for k, (rule, f) in fields}

    def fields(self) -> dict[str, tuple[Rule, dataclasses.Field[Any]]]:
        """Return the rule and the field of every option but the weights, outermost rules first."""
        found: dict[str, tuple[Rule, dataclasses.Field[Any]]] = {}
        for side in ("client", "server"):
            for rule in chain(getattr(self, side)):
                for field in dataclasses.fields(rule):
                    inner = isinstance(getattr(rule, field.name), Rule)
                    if not inner and not field.metadata.get("derived"):
                        found.setdefault(f"{side}.{field.name}", (rule, field))
        return found

    def with_options(self, options: Mapping[str, Any]) -> Algorithm:
        """Return a copy with fields changed: ``client.FIELD``, ``server.FIELD``, ``weights``.

        A field of a wrapped rule is named as if it were the wrapper's own. An unknown key or a
        value out of range is an InputError.
        """
        known = self.options()
        changed = self
        for name, value in options.items():
            if name not in known:
                raise unknown(f"option of {self.name}", name, known)
            side, _, field = name.rpartition(".")
            try:
                if not side:
                    changed = dataclasses.replace(changed, weights=value)
                else:
                    rule = replace_in_chain(getattr(changed, side), field, value)
                    changed = dataclasses.replace(changed, **{side: rule})
            except InputError as error:
                raise InputError(f"{self.name}, {name}: {error}") from None
        return changed


@dataclass(frozen=True)
class AlgorithmInfo:
    """An algorithm with its defaults, and what a user wants to know about it.

    Traffic and state are declared here in multiples of the model and checked against what is
    counted in a run. Scalars (steps, rounds, losses, learning rates) are left out.
    """

    algorithm: Algorithm
    summary: str
    source: str
    """Authors and year."""
    family: str = "others"
    """Row of the README's table that names it."""
    down: float = 1
    """Sent to each client of a cohort, every round."""
    up: float = 1
    """Sent back."""
    client_keeps: float = 0
    """Kept between rounds by every client that has taken part."""
    server_keeps: float = 0
    """Kept by the server besides the model."""
    inferred: str = ""
    """Parts that we inferred because no source could be read; shown wherever results are."""
    about: str = ""
    """Equations and remarks: the docstring of its module, which the table fills in."""


R = TypeVar("R", bound=Rule)


def inner_rules(rule: Rule) -> dict[str, Rule]:
    """Return the rules that a wrapper holds, by field name."""
    fields = dataclasses.fields(rule)  # type: ignore[arg-type]
    values = {field.name: getattr(rule, field.name) for field in fields}
    return {name: value for name, value in values.items() if isinstance(value, Rule)}


def chain(rule: Rule) -> list[Any]:
    """Return a rule and the rules inside it, outermost first."""
    return [rule, *(r for inner in inner_rules(rule).values() for r in chain(inner))]


def replace_in_chain(rule: Any, field: str, value: Any) -> Any:
    """Return a copy with a field changed, in the outermost rule that has it."""
    if field in {f.name for f in dataclasses.fields(rule)}:
        return dataclasses.replace(rule, **{field: value})
    for name, inner in inner_rules(rule).items():
        if any(field in {f.name for f in dataclasses.fields(r)} for r in chain(inner)):
            return dataclasses.replace(rule, **{name: replace_in_chain(inner, field, value)})
    raise AttributeError(field)


def _check_rule(side: str, rule: Any, kind: type[Rule]) -> None:
    """Reject a value that is not a rule of this kind, or not a dataclass."""
    name = (rule if isinstance(rule, type) else type(rule)).__name__
    if not isinstance(rule, kind):
        example = "SGD(lr=0.1)" if kind is ClientRule else "Average()"
        if isinstance(rule, type) and issubclass(rule, kind):
            example = f"{name}(...), an instance of the class"
        shown = name if isinstance(rule, type | Rule) else repr(rule)
        raise InputError(f"{side} = {shown}: expected a {kind.__name__}, such as {example}")
    # @dataclass replaces a field that number(...) or choice(...) declared by its default.
    undone = any(isinstance(value, dataclasses.Field) for value in vars(type(rule)).values())
    if undone or not dataclasses.is_dataclass(rule):
        raise InputError(f"{name} is not a dataclass: put @dataclass(frozen=True) above the class")
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Rule) or (isinstance(value, type) and issubclass(value, Rule)):
            _check_rule(field.name, value, kind)


def _check_pairing(client: ClientRule, server: ServerRule) -> None:
    sides = [{r.pairing: type(r).__name__ for r in chain(side)} for side in (client, server)]
    alone = (sides[0].keys() ^ sides[1].keys()) - {""}
    if alone:
        # The rule whose partner is missing, or the innermost one.
        names = [
            next((rules[pairing] for pairing in alone & rules.keys()), list(rules.values())[-1])
            for rules in sides
        ]
        raise InputError(
            f"{names[0]} clients do not work with the server rule {names[1]}: rules with different "
            f"`pairing` names ({' and '.join(sorted(alone))}) cannot be combined; use both sides "
            "or neither"
        )


_ORDER: Mapping[WrapperKind, int] = {"clip": 0, "change": 1, "project": 1, "pull": 2}
"""Order of wrappers from the loss to the step; a schedule may be anywhere."""


def _check_wrappers(client: ClientRule) -> None:
    for outer, inner in itertools.combinations(chain(client), 2):
        around = f"{type(outer).__name__} around {type(inner).__name__}"
        if outer.wrapper_kind in inner.incompatible:
            raise InputError(f"{around}: {inner.incompatible[outer.wrapper_kind]}")
        order = [_ORDER[r.wrapper_kind] for r in (outer, inner) if r.wrapper_kind in _ORDER]
        if inner_rules(inner) and order != sorted(order):
            raise InputError(
                f"{around}: the outermost acts first, and gradients are clipped, then "
                "projected, then the model is pulled; swap the two"
            )


def numbers(rule: Rule) -> dict[str, float]:
    """Return the numeric fields of a rule and of the rules inside, by path (``"inner.lr"``)."""
    found = {
        field.name: float(getattr(rule, field.name))
        for field in dataclasses.fields(rule)  # type: ignore[arg-type]
        if "number" in field.metadata and getattr(rule, field.name) is not None
    }
    for name, inner in inner_rules(rule).items():
        found |= {f"{name}.{path}": value for path, value in numbers(inner).items()}
    return found


def bind(rule: R, values: Mapping[str, Tensor]) -> R:
    """Return the rule with its numbers replaced by tensors, by the paths of :func:`numbers`."""
    changes: dict[str, Any] = {path: v for path, v in values.items() if "." not in path}
    for name, inner in inner_rules(rule).items():
        prefix = f"{name}."
        below = {p.removeprefix(prefix): v for p, v in values.items() if p.startswith(prefix)}
        changes[name] = bind(inner, below)
    return dataclasses.replace(rule, **changes)  # type: ignore[type-var]


def map_rule(
    rule: Rule, function: Callable[..., Any], values: Mapping[str, Tensor], *args: Any
) -> Any:
    """Map ``function(rule, *args)`` over rows, the rule bound to the numbers of each row."""
    return torch.vmap(lambda own, *a: function(bind(rule, own), *a))(dict(values), *args)


def structure(rule: R) -> R:
    """Replace every number by a placeholder: the result is equal for trials that can be packed."""
    changes: dict[str, Any] = {name: structure(r) for name, r in inner_rules(rule).items()}
    copy = dataclasses.replace(rule, **changes)  # type: ignore[type-var]
    for path in numbers(rule):
        if "." not in path:
            # Not through the constructor: zero may be outside of the field's range.
            object.__setattr__(copy, path, 0.0)
    return copy
