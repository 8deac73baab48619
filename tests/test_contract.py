"""Rules and algorithms as values: checked, changed by name, packed, stored."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import strategies as st

from fedzmg import algorithms
from fedzmg.algorithms import SGD, Adam, Average, ReddiAdam, ZeroMean
from fedzmg.contract import (
    Algorithm,
    ClientRule,
    Number,
    ParamInfo,
    bind,
    inner_rules,
    number,
    numbers,
    structure,
)
from fedzmg.errors import InputError
from fedzmg.messages import ClientContext
from fedzmg.tree import Tree
from golden_problems import make_context

NAMES = sorted(algorithms.ALGORITHMS)


@dataclass(frozen=True)
class Boxed(ClientRule):
    """A rule with every kind of field."""

    rate: Number = number(0.5, low=0, high=1, doc="a closed range")
    open: Number = number(0.5, above=0, below=1, doc="an open range")
    any: Number = number(0.0, doc="no range")
    extra: Number | None = number(None, low=2, doc="absent by default")
    label: str = "x"

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.rate * grad, scratch


@dataclass(frozen=True)
class Wrapper(ClientRule):
    """A wrapper with a number of its own, above the rule it wraps."""

    inner: ClientRule
    scale: Number = number(2.0, above=0, doc="factor of every gradient")

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return self.inner.step(context, params, scratch, self.scale * grad)


def boxed(**methods: Any) -> Algorithm:
    kind = dataclass(frozen=True)(type("Mine", (Boxed,), methods))
    return Algorithm("mine", kind(), Average())


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ({"init_memmory": lambda self, params: ()}, "'init_memory'"),
        ({"start": lambda self: ()}, "(self, context)"),
        ({"step": lambda self, context, scratch, params, grad: ()}, "params, scratch, grad"),
    ],
)
def test_methods_that_no_engine_would_call_are_rejected(
    methods: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        boxed(**methods)
    boxed(_start=lambda self: (), start=lambda self, given: given.params)


# Ranges.


CLOSED, OPEN = ">= 0 and <= 1", "> 0 and < 1"


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        *(("rate", value, CLOSED) for value in (1.5, -1e-9, None)),
        *(("open", value, OPEN) for value in (0, 1.0, None)),
        *(("any", value, "") for value in (math.inf, -math.inf, math.nan, "0.5", True, [1], None)),
        ("extra", 1.0, ">= 2"),
    ],
)
def test_values_out_of_range_are_rejected(field: str, value: Any, limits: str) -> None:
    with pytest.raises(InputError, match=rf"^{field} = {re.escape(repr(value))}: .*{limits}$"):
        Boxed(**{field: value})


@pytest.mark.parametrize(
    "fields", [{"rate": 0}, {"rate": 1}, {"any": -1e300}, {"extra": 2}, {"extra": None}]
)
def test_borders_belong_to_closed_ranges(fields: dict[str, Any]) -> None:
    [(name, value)] = fields.items()
    assert getattr(Boxed(**fields), name) == value


@pytest.mark.parametrize(
    "number", [np.float32(0.25), np.float64(0.25), np.int64(1), Fraction(1, 4)]
)
def test_numbers_of_other_kinds_become_plain_ones(number: Any) -> None:
    """As they come out of arrays of rates; options are compared, shown and written down."""
    rate = SGD(lr=number).lr
    assert rate == number
    assert type(rate) in (int, float)
    with pytest.raises(InputError, match=r"^lr = .*-.*: expected a finite number > 0$"):
        SGD(lr=-number)


# Numbers, binding, structure.


def test_numbers_by_path() -> None:
    rule = Wrapper(ZeroMean(SGD(lr=0.25, decay=0.5)), scale=3)
    assert numbers(rule) == {"scale": 3.0, "inner.inner.lr": 0.25, "inner.inner.decay": 0.5}
    assert list(inner_rules(rule)) == ["inner"]
    assert numbers(Boxed()) == {"rate": 0.5, "open": 0.5, "any": 0.0}


@hypotheses(
    st.floats(1e-3, 1),
    st.one_of(st.none(), st.floats(0, 0.99)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.floats(0.1, 9),
)
def test_binding_its_own_numbers_changes_nothing(
    lr: float, momentum: float | None, decay: float | None, scale: float
) -> None:
    rule = Wrapper(SGD(lr, momentum, decay), scale=scale)
    found = numbers(rule)
    bound = bind(rule, {path: torch.tensor(v, dtype=torch.float64) for path, v in found.items()})
    assert type(bound) is Wrapper
    assert numbers(bound) == found
    params = Tree({"w": torch.tensor([1.0, -2.0], dtype=torch.float64)})
    context = make_context(params)
    results = []
    for one in (rule, bound):
        w, state = one.step(context, params, one.inner.begin(context, ()), params)
        results.append(one.step(context, w, state, w)[0]["w"])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_structure_forgets_numbers_and_nothing_else() -> None:
    assert structure(SGD(lr=0.1)) == structure(SGD(lr=7.0))
    assert structure(SGD(momentum=0.1)) == structure(SGD(momentum=0.9))
    assert structure(SGD(momentum=0.1)) != structure(SGD())
    assert structure(SGD(decay=0.0)) != structure(SGD())
    assert structure(ZeroMean(SGD(0.1))) == structure(ZeroMean(SGD(0.2)))
    assert structure(ZeroMean(SGD())) != structure(SGD())
    assert structure(ZeroMean(SGD(), {"w": (1,)})) != structure(ZeroMean(SGD(), {"w": (0,)}))
    assert structure(Boxed(label="x")) != structure(Boxed(label="y"))
    assert structure(Adam()) != structure(ReddiAdam())
    assert structure(ReddiAdam(v0=0.1)) != structure(ReddiAdam())


# Options of an algorithm.


def test_options_by_key() -> None:
    assert algorithms.get("fedzmg").options() == {
        "weights": "examples",
        "client.lr": 0.1,
        "client.momentum": 0.9,
        "client.decay": 0.0005,
        "client.form": "heavy_ball",
        "client.decay_scope": "all",
        "client.project": "all",
        "client.embedding_axis": "vocab",
        "client.biases": "free",
        "server.lr": 1.0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_options_round_trip(name: str) -> None:
    algorithm = algorithms.get(name)
    assert algorithm.with_options(algorithm.options()) == algorithm
    assert algorithm.with_options({}) == algorithm


def test_axes_of_a_layout_are_not_options() -> None:
    layout = {"w": ParamInfo("kernel", (1,))}
    algorithm = algorithms.get("fedzmg").for_layout(layout)
    assert "client.axes" not in algorithm.options()
    with pytest.raises(InputError, match=r"unknown option of fedzmg 'client.axes'"):
        algorithm.with_options({"client.axes": None})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"client.lrr": 1}, "unknown option of fedavg 'client.lrr': did you mean 'client.lr'"),
        ({"client.lr": -1}, "fedavg, client.lr: lr = -1"),
        ({"client.lr": "fast"}, "fedavg, client.lr: lr = 'fast'"),
        ({"client.lr": None}, "fedavg, client.lr: lr = None"),
        ({"client.momentum": 1}, "fedavg, client.momentum: momentum = 1"),
        ({"client.form": "nestrov"}, "unknown form 'nestrov': did you mean 'nesterov'"),
        ({"weights": "example"}, "unknown weights 'example': did you mean 'examples'"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        algorithms.get("fedavg").with_options(options)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("fedzgm", "fedzmg"), ("FEDADAM", "fedadam"), ("FedSGD", "fedavg"), ("FedOpt", "fedadam")],
)
def test_unknown_algorithm_is_rejected(given: str, meant: str) -> None:
    with pytest.raises(InputError, match=rf"^unknown algorithm '{given}': did you mean '{meant}'"):
        algorithms.get(given)
