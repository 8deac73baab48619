"""Combinations of rules: pairing, the order of wrappers, incompatible wrappers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from fedzmg import algorithms
from fedzmg.algorithms import SGD, Adam, Average, Projected, ServerSetProx, ZeroMean
from fedzmg.contract import Algorithm, ClientRule, ServerRule, WrapperKind, chain, inner_rules
from fedzmg.errors import InputError
from fedzmg.wrappers.clip import ClipNorm, ClipValue
from fedzmg.wrappers.schedule import ClientSchedule, ServerSchedule
from fedzmg.wrappers.wrapper import Wrapper

NAMES = sorted(algorithms.ALGORITHMS)


@dataclass(frozen=True)
class Paired(SGD):
    """A client rule that only its own server understands."""

    pairing = "pair"


@dataclass(frozen=True)
class Reads(Average):
    """The server rule of ``Paired`` clients."""

    pairing = "pair"


@dataclass(frozen=True)
class Signs(SGD):
    """A client rule that rejects clipping."""

    incompatible: ClassVar[Mapping[WrapperKind, str]] = {"clip": "clipping never changes a sign"}


@dataclass(frozen=True)
class Pulls(Wrapper):
    """A wrapper that pulls the model."""

    wrapper_kind = "pull"


@dataclass(frozen=True)
class Changes(Wrapper):
    """A wrapper of unknown kind."""


@dataclass(frozen=True)
class Projects(Wrapper):
    """A wrapper that projects."""

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
        (ClipNorm(ZeroMean(Pulls(SGD()))), Average()),
        (ClipNorm(ClipValue(SGD())), Average()),
        (ClipValue(ClipNorm(Changes(Projects(Changes(Pulls(SGD())))))), Average()),
        (ZeroMean(ZeroMean(SGD())), Average()),
        (ClientSchedule(ClipNorm(SGD()), "constant"), Average()),
        (ClipNorm(ClientSchedule(ZeroMean(SGD()), "constant")), Average()),
        (Pulls(ClientSchedule(SGD(), "constant")), Average()),
    ],
)
def test_partners_and_wrappers_in_order_are_accepted(
    client: ClientRule, server: ServerRule
) -> None:
    assert Algorithm("a", client, server).client == client


@pytest.mark.parametrize(
    ("client", "server", "named"),
    [
        (Paired(), Average(), "Paired clients .* Average"),
        (ZeroMean(Paired()), Adam(), "Paired clients .* Adam"),
        (SGD(), Reads(), "SGD clients .* Reads"),
        (SGD(), ServerSchedule(Reads(), "constant"), "SGD clients .* Reads"),
        (ServerSetProx(SGD()), Average(), "ServerSetProx clients .* Average"),
        (SGD, Average(), r"client = SGD: .* ClientRule, such as SGD\(...\)"),
        (Average(), SGD(), r"client = Average: .* ClientRule, such as SGD\(lr"),
        (Average, SGD(), r"client = Average: .* ClientRule, such as SGD\(lr"),
        (SGD(), "adam", r"server = 'adam': .* ServerRule, such as Average\("),
        (ZeroMean(ClipNorm(SGD())), Average(), "ZeroMean around ClipNorm"),
        (Projects(ClipValue(SGD())), Average(), "Projects around ClipValue"),
        (Changes(ClipNorm(SGD())), Average(), "Changes around ClipNorm"),
        (Pulls(ZeroMean(SGD())), Average(), "Pulls around ZeroMean"),
        (Pulls(ClipNorm(SGD())), Average(), "Pulls around ClipNorm"),
        (Pulls(Changes(SGD())), Average(), "Pulls around Changes"),
        (ClipNorm(Pulls(Projects(SGD()))), Average(), "Pulls around Projects"),
        (ZeroMean(ClientSchedule(ClipNorm(SGD()), "constant")), Average(), "ZeroMean around Clip"),
        (ClipNorm(Signs()), Average(), "ClipNorm around Signs: clipping never changes a sign"),
        (ClipValue(ZeroMean(Signs())), Average(), "ClipValue around Signs: clipping never"),
    ],
)
def test_rules_that_do_not_fit_are_rejected(client: Any, server: Any, named: str) -> None:
    with pytest.raises(InputError, match=f"^mine: {named}"):
        Algorithm("mine", client, server)


def test_a_server_inside_a_wrapper_keeps_its_weights() -> None:
    client, server = algorithms.get("feddyn").client, algorithms.get("feddyn").server
    for around in (server, Projected(server)):
        with pytest.raises(InputError, match=r"^mine: weights = 'examples': it needs 'uniform'$"):
            Algorithm("mine", client, around, weights="examples")
        assert Algorithm("mine", client, around, weights="uniform").server == around


def test_exchanging_a_rule_later_is_rejected_too() -> None:
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


# Refusals.


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
            named = f"{name}: {wrap.__name__} around {type(core).__name__}: {reason}"
            with pytest.raises(InputError, match=named):
                replace(row, client=wrap(core))
