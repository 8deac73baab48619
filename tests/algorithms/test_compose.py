"""Which rules go together: partners, the order of wrappers, wrappers that a rule refuses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from fedzmg import algorithms
from fedzmg.algorithms import SGD, Adam, Average, Projected, ServerSetProx, ZeroMean
from fedzmg.algorithms.clip import ClipNorm, ClipValue
from fedzmg.algorithms.options import configure
from fedzmg.algorithms.schedule import ClientSchedule, ServerSchedule
from fedzmg.algorithms.wrapper import Wrapper
from fedzmg.contract import (
    Algorithm,
    ClientContext,
    ClientRule,
    Cohort,
    Number,
    ServerRule,
    WrapperKind,
    chain,
    inner_rules,
    number,
)
from fedzmg.errors import InputError
from fedzmg.tree import Tree

NAMES = sorted(algorithms.ALGORITHMS)


@dataclass(frozen=True)
class Paired(ClientRule):
    """Sends what only its own server understands."""

    lr: Number = number(0.1, above=0, doc="client learning rate")

    pairing = "pair"

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad, scratch


@dataclass(frozen=True)
class Reads(ServerRule):
    """Understands it."""

    lr: Number = number(1.0, above=0, doc="server learning rate")

    pairing = "pair"

    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        return params - self.lr * cohort.delta, state


@dataclass(frozen=True)
class Signs(ClientRule):
    """Takes the sign of its gradient, and wants it as it is."""

    lr: Number = number(0.1, above=0, doc="client learning rate")

    incompatible: ClassVar[Mapping[WrapperKind, str]] = {"clip": "clipping never changes a sign"}

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad.sign(), scratch


@dataclass(frozen=True)
class Pulls(Wrapper):
    """Pulls the model somewhere."""

    wrapper_kind = "pull"


@dataclass(frozen=True)
class Changes(Wrapper):
    """Says nothing about what it does."""


@dataclass(frozen=True)
class Projects(Wrapper):
    """Says that it projects."""

    wrapper_kind = "project"


# Partners.


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (SGD(), Average()),
        (SGD(), Adam()),
        (Paired(), Reads()),
        (ZeroMean(Paired()), Reads()),
        (ClipNorm(ZeroMean(Paired())), ServerSchedule(Reads(), "constant")),
    ],
)
def test_partners_go_together_whatever_is_around_them(
    client: ClientRule, server: ServerRule
) -> None:
    assert Algorithm("a", client, server).client == client


@pytest.mark.parametrize(
    ("client", "server", "who"),
    [
        (Paired(), Average(), "Paired clients do not work with the server rule Average"),
        (ZeroMean(Paired()), Adam(), "Paired clients do not work with the server rule Adam"),
        (SGD(), Reads(), "SGD clients do not work with the server rule Reads"),
        (
            SGD(),
            ServerSchedule(Reads(), "constant"),
            "SGD clients do not work with the server rule Reads",
        ),
    ],
)
def test_a_rule_without_its_partner_is_refused(
    client: ClientRule, server: ServerRule, who: str
) -> None:
    with pytest.raises(InputError) as caught:
        Algorithm("mine", client, server)
    assert str(caught.value) == (
        f"mine: {who}: what clients and server of pair exchange has a meaning only between the "
        "two; use both or neither"
    )


def test_a_server_inside_a_wrapper_keeps_its_weights() -> None:
    client, server = algorithms.get("feddyn").client, algorithms.get("feddyn").server
    for around in (server, Projected(server)):
        with pytest.raises(InputError, match=r"^mine: weights = 'examples': it needs 'uniform'$"):
            Algorithm("mine", client, around, weights="examples")
        assert Algorithm("mine", client, around, weights="uniform").server == around


def test_exchanging_a_rule_later_is_refused_too() -> None:
    with pytest.raises(InputError, match=r"^scheme: SGD clients do not work with the server rule"):
        replace(Algorithm("scheme", Paired(), Reads()), client=SGD())


def partners(rule: Any) -> set[str]:
    return {inner.pairing for inner in chain(rule)} - {""}


def test_rows_of_the_table_mix_exactly_where_partners_agree() -> None:
    """Every client rule of the table with every server rule."""
    rows = [algorithms.get(name) for name in NAMES]
    refused = 0
    for one, other in itertools.product(rows, rows):
        if partners(one.client) == partners(other.server):
            assert replace(one, server=other.server).server == other.server
        else:
            refused += 1
            with pytest.raises(InputError, match="do not work with the server rule"):
                replace(one, server=other.server)
    assert refused == sum(
        partners(one.client) != partners(other.client) for one in rows for other in rows
    )


# Order.


@pytest.mark.parametrize(
    "client",
    [
        ClipNorm(ZeroMean(Pulls(SGD()))),
        ClipNorm(ClipValue(SGD())),
        ClipValue(ClipNorm(Changes(Projects(Changes(Pulls(SGD())))))),
        ZeroMean(ZeroMean(SGD())),
        ClientSchedule(ClipNorm(SGD()), "constant"),
        ClipNorm(ClientSchedule(ZeroMean(SGD()), "constant")),
        Pulls(ClientSchedule(SGD(), "constant")),
    ],
)
def test_wrappers_in_the_order_of_a_step_are_taken(client: ClientRule) -> None:
    assert Algorithm("a", client, Average()).client == client


@pytest.mark.parametrize(
    ("client", "around"),
    [
        (ZeroMean(ClipNorm(SGD())), "ZeroMean around ClipNorm"),
        (Projects(ClipValue(SGD())), "Projects around ClipValue"),
        (Changes(ClipNorm(SGD())), "Changes around ClipNorm"),
        (Pulls(ZeroMean(SGD())), "Pulls around ZeroMean"),
        (Pulls(ClipNorm(SGD())), "Pulls around ClipNorm"),
        (Pulls(Changes(SGD())), "Pulls around Changes"),
        (ClipNorm(Pulls(Projects(SGD()))), "Pulls around Projects"),
        (ZeroMean(ClientSchedule(ClipNorm(SGD()), "constant")), "ZeroMean around ClipNorm"),
    ],
)
def test_wrappers_in_another_order_are_refused(client: ClientRule, around: str) -> None:
    with pytest.raises(InputError) as caught:
        Algorithm("mine", client, Average())
    assert str(caught.value) == (
        f"mine: {around}: the outermost acts first, and gradients are clipped, then projected, "
        "then the model is pulled; exchange the two"
    )


def test_keys_that_add_wrappers_keep_the_order() -> None:
    base = Algorithm("a", ZeroMean(Pulls(SGD())), Average())
    found = configure(base, {"client.schedule": "constant", "client.clip_norm": 1.0})
    assert [type(rule).__name__ for rule in chain(found.client)] == [
        "ClipNorm", "ClientSchedule", "ZeroMean", "Pulls", "SGD"
    ]  # fmt: skip


# Refusals.


def test_a_rule_says_which_wrappers_it_cannot_bear_and_why() -> None:
    assert Algorithm("a", ZeroMean(Signs()), Average()).name == "a"
    for client in (ClipNorm(Signs()), ClipValue(ZeroMean(Signs()))):
        name = type(client).__name__
        with pytest.raises(InputError) as caught:
            Algorithm("mine", client, Average())
        assert str(caught.value) == f"mine: {name} around Signs: clipping never changes a sign"
    with pytest.raises(InputError, match=r"^a: ClipNorm around Signs: clipping never changes"):
        configure(Algorithm("a", Signs(), Average()), {"client.clip_norm": 1.0})


WRAPPERS: list[Any] = [ClipNorm, ClipValue, Projects, ZeroMean, Changes, Pulls]


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_the_table_refuse_what_they_declare(name: str) -> None:
    """Around the innermost rule alone, so that the order has no say."""
    row = algorithms.get(name)
    core = chain(row.client)[-1]
    row = replace(row, client=core) if partners(core) == partners(row.client) else row
    if inner_rules(row.client):
        return
    for wrap in WRAPPERS:
        reason = core.incompatible.get(wrap.wrapper_kind)
        if reason is None:
            assert replace(row, client=wrap(core)).client == wrap(core)
        else:
            with pytest.raises(InputError) as caught:
                replace(row, client=wrap(core))
            assert str(caught.value) == (
                f"{name}: {wrap.__name__} around {type(core).__name__}: {reason}"
            )


@pytest.mark.parametrize(
    ("client", "server", "message"),
    [
        (
            ServerSetProx(SGD()),
            Average(),
            "x: ServerSetProx clients do not work with the server rule Average",
        ),
        (SGD, Average(), r"x: client = SGD: a class; use a rule, SGD\(...\)"),
        (Average(), SGD(), "x: client = Average: expected a ClientRule, not a server rule"),
    ],
)
def test_what_is_no_algorithm_is_said_by_name(client: Any, server: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Algorithm("x", client, server)
