"""Rules: frozen dataclasses whose fields are checked hyper-parameters, possibly one in another."""

import dataclasses
import difflib
import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import FunctionType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

from torch import Tensor

from fedzmg.errors import InputError, check_names, unknown
from fedzmg.tree import vmap

T = TypeVar("T")
Number: TypeAlias = float | Tensor
"""A hyper-parameter that may differ between trials trained together; a 0-d tensor inside an engine,
so it is used only arithmetically."""

Role = Literal[
    "kernel", "recurrent_kernel", "embedding", "bias", "norm", "unknown", "statistics", "counts",
    "lora_A", "lora_B", "lora_base",
]  # fmt: skip
"""``unknown``: a weight of a module whose input axes are not known. ``statistics`` and ``counts``
(whole numbers): buffers that training passes change, such as those of a normalisation layer."""


class ParamInfo(NamedTuple):
    """Role and input axes of one parameter."""

    role: Role
    input_axes: tuple[int, ...]
    layer: str = ""  # type of its module, such as ``Conv2d``; several with other axes: ``A+B``
    scale: float | None = None  # factor of an adapter's product, beside its A

    @property
    def is_buffer(self) -> bool:
        """Changes in training passes, and is not trained."""
        return self.role in ("statistics", "counts")

    def __repr__(self) -> str:
        # Fingerprints of tasks contain it: a field that came later is shown only if it is set.
        shown = (f"{name}={v!r}" for name, v in self._asdict().items() if v is not None)
        return f"ParamInfo({', '.join(shown)})"


Layout: TypeAlias = Mapping[str, ParamInfo]


def number(
    default: float | None, *, low: float = -math.inf, high: float = math.inf,
    above: float = -math.inf, below: float = math.inf, doc: str,
) -> Any:  # fmt: skip
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


def whole(default: int | None, *, low: int = 0, doc: str) -> Any:
    """Declare a rule's field that holds a whole number, the same for all trials of a pack."""
    return dataclasses.field(default=default, metadata={"whole": low, "doc": doc})


def flag(default: bool, *, doc: str) -> Any:
    """Declare a rule's field that is true or false."""
    return dataclasses.field(default=default, metadata={"flag": True, "doc": doc})


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def rule_class(kind: type[T]) -> type[T]:
    """Make a class a rule of this package: a frozen dataclass without subclasses."""
    return typing.final(dataclasses.dataclass(frozen=True)(kind))


class Rule:
    """Base of client and server rules: checked fields and a layout."""

    pairing: ClassVar[str] = ""  # name shared by client and server rules that need each other
    _example: ClassVar[str] = ""
    _known_needs: ClassVar[tuple[str, ...]] = ("client", "key")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            limits, words = field.metadata.get("number"), field.metadata.get("words")
            value = getattr(self, field.name)
            if limits is not None and isinstance(value, Tensor):
                continue
            if words is not None and value not in words:
                raise unknown(field.name, str(value), words)
            absent = value is None and field.default is None
            if "flag" in field.metadata and not isinstance(value, bool):
                raise InputError(f"{field.name} = {value!r}: expected true or false")
            low = field.metadata.get("whole")
            if low is not None and not absent and (type(value) is not int or value < low):
                raise InputError(f"{field.name} = {value!r}: expected a whole number >= {low}")
            if limits is None or absent:
                continue
            if isinstance(value, Real) and not isinstance(value, bool):
                # NumPy numbers become Python numbers: options are compared, shown and stored.
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, field.name, value)
                closed = limits["low"] <= value <= limits["high"]
                finite = abs(value) <= sys.float_info.max  # of any number of digits
                if closed and limits["above"] < value < limits["below"] and finite:
                    continue
            signs = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
            ends = [f"{s} {limits[k]:g}" for k, s in signs.items() if abs(limits[k]) < math.inf]
            wanted = " ".join(["a finite number", " and ".join(ends)]).strip()
            raise InputError(f"{field.name} = {value!r}: expected {wanted}")

    def for_layout(self, layout: Layout) -> Self:
        """Return this rule with the roles and input axes of a model's parameters."""
        inner = {name: rule.for_layout(layout) for name, rule in inner_rules(self).items()}
        return dataclasses.replace(self, **inner) if inner else self  # type: ignore[type-var]

    def for_parts(self, personal: tuple[str, ...]) -> Self:
        """Return this rule with the names of a model's personal parameters."""
        inner = {name: rule.for_parts(personal) for name, rule in inner_rules(self).items()}
        return dataclasses.replace(self, **inner) if inner else self  # type: ignore[type-var]


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
    return vmap(lambda own, *a: function(bind(rule, own), *a))(dict(values), *args)


def structure(rule: R) -> R:
    """Replace every number by a placeholder: the result is equal for trials that can be packed."""
    changes: dict[str, Any] = {name: structure(r) for name, r in inner_rules(rule).items()}
    copy = dataclasses.replace(rule, **changes)  # type: ignore[type-var]
    for path in numbers(rule):
        if "." not in path:
            # Not through the constructor: zero may be outside of the field's range.
            object.__setattr__(copy, path, 0.0)
    return copy


def check_rule(side: str, rule: Any, kind: type[Rule]) -> None:
    """Reject a value that is not a rule of this kind, or not a dataclass."""
    name = (rule if isinstance(rule, type) else type(rule)).__name__
    if not isinstance(rule, kind):
        example = kind._example
        if isinstance(rule, type) and issubclass(rule, kind):
            example = f"{name}(...), an instance of the class"
        shown = name if isinstance(rule, type | Rule) else repr(rule)
        raise InputError(f"{side} = {shown}: expected {kind.__name__}, such as {example}")
    # @dataclass replaces a field that number(...) or choice(...) declared by its default.
    undone = any(isinstance(value, dataclasses.Field) for value in vars(type(rule)).values())
    made = getattr(rule, "__dataclass_params__", None)
    if undone or not dataclasses.is_dataclass(rule) or not (made and made.frozen):
        raise InputError(f"{name} is not a frozen dataclass: put @dataclass(frozen=True) above it")
    _check_methods(type(rule), kind)
    check_names(f"value in {name}.needs", getattr(rule, "needs", ()), kind._known_needs)
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, Rule) or (isinstance(value, type) and issubclass(value, Rule)):
            check_rule(field.name, value, kind)


@functools.cache
def _check_methods(rule: type, kind: type[Rule]) -> None:
    """Reject methods whose names are nearly, or whose arguments are not, those of ``kind``."""
    known = {n: v for n, v in vars(kind).items() if isinstance(v, FunctionType) and n[0] != "_"}
    classes = rule.__mro__[: rule.__mro__.index(kind)]
    for name, method in [pair for one in classes for pair in vars(one).items()]:
        if name.startswith("_") or not isinstance(method, FunctionType):
            continue
        if not (close := difflib.get_close_matches(name, known, n=1, cutoff=0.85)):
            continue
        if name not in known:
            problem = f"{rule.__name__}.{name}: {kind.__name__} has no such method"
            raise InputError(f"{problem}; did you mean {close[0]!r}? (a helper: '_{name}')")
        given, wanted = ([*inspect.signature(f).parameters] for f in (method, known[name]))
        wrong = given != wanted and set(given) == set(wanted)
        try:
            inspect.signature(method).bind(*wanted)
        except TypeError:
            wrong = True
        if wrong:
            problem = f"{rule.__name__}.{name}({', '.join(given)})"
            raise InputError(f"{problem}: expected the arguments ({', '.join(wanted)})")
