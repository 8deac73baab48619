"""The suite finds the mistakes it is there for, and reports them in rows."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedzmg import Algorithm, InputError, Tree, algorithms
from fedzmg.algorithms import SGD, Average
from fedzmg.contract import AlgorithmInfo, ClientRule, Number, number
from fedzmg.testing import check

CALLS = itertools.count()


@dataclass(frozen=True)
class Good(ClientRule):
    lr: Number = number(0.1, above=0, doc="learning rate")

    def step(self, context: Any, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * self.direction(grad), scratch

    def direction(self, grad: Tree) -> Tree:
        return grad


@dataclass(frozen=True)
class Normalizes(Good):
    def direction(self, grad: Tree) -> Tree:
        return grad.map(lambda leaf: leaf / leaf.norm())


@dataclass(frozen=True)
class Idle(Good):
    def direction(self, grad: Tree) -> Tree:
        return 0 * grad


@dataclass(frozen=True)
class Tires(Good):
    """Keeps a secret count, and changes its mind after the dry run."""

    def direction(self, grad: Tree) -> Tree:
        return grad / (1 + (next(CALLS) > 40))


@dataclass(frozen=True)
class Breaks(Good):
    def direction(self, grad: Tree) -> Tree:
        if next(CALLS) > 8:
            raise KeyError("rate")
        return grad


@dataclass(frozen=True)
class Branches(Good):
    def direction(self, grad: Tree) -> Tree:
        return grad if grad["dense.bias"].sum() > 0 else -grad


@dataclass(frozen=True)
class PlainFloat(Good):
    mu: float = 0.5


@dataclass(frozen=True)
class Halves(Good):
    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", self.lr / 2)


@dataclass(frozen=True)
class Narrows(Good):
    def begin(self, context: Any, full_pass: Any) -> Any:
        return context.params.zeros()

    def step(self, context: Any, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad, scratch.map(torch.Tensor.float)


def mine(client: ClientRule) -> Algorithm:
    return Algorithm("mine", client, Average())


FILE = r"^\S*test_check.py:\d+: "
MISTAKES: dict[str, tuple[Any, str]] = {
    "pure rules": (mine(Narrows()), rf"{FILE}Narrows.step .*float32.*float64"),
    "zero gradients": (mine(Normalizes()), rf"{FILE}Normalizes.step returned NaN"),
    "numbers": (mine(PlainFloat()), r"^client.mu: .*number"),
    "options": (mine(Halves()), r"lr=0\.025.*lr=0\.05"),
    "engines agree": (mine(Idle()), "does nothing"),
    "packed = alone": (mine(Tires()), r"sequential: .* differ by .* in .*params"),
    "one client": (mine(Breaks()), rf"{FILE}Breaks.direction: KeyError: 'rate'"),
    "bytes as declared": (
        AlgorithmInfo(mine(Good()), "", "", up=3, server_keeps=0.5),
        r"^up = 3: 1 counted; server_keeps = 0.5: 0 counted",
    ),
    "compiled step": (mine(Branches()), rf"{FILE}Branches.direction: .*torch.where"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_fails_its_property_in_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CALLS", itertools.count())
    algorithm, reason = MISTAKES[name]
    result = check(algorithm, only=[name])
    [row] = result.rows
    assert not result.ok
    assert re.search(reason, row.detail), row.detail
    assert "\n" not in row.detail
    lines = str(result).splitlines()
    assert re.match(f"{name} +FAILED", lines[1])
    assert lines[-1] == "mine: 0 of 1 properties hold"
    assert ('raise KeyError("rate")' in str(result)) == (name == "one client")
    assert "fedzmg/" not in row.traceback


def test_plain_algorithm_of_ones_own_passes_and_is_counted() -> None:
    quick = ["pure rules", "zero gradients", "options", "numbers", "bytes as declared"]
    result = check(mine(Good()), only=quick)
    assert result.ok, str(result)
    assert result.rows[-1].detail == (
        "not declared; counted down=1, up=1, client_keeps=0, server_keeps=0"
    )
    assert result.as_dict()["ok"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [(["fedavg"], "fedavg"), ([algorithms.get("fedavg"), ["speed"]], "speed")],
)
def test_wrong_arguments_are_refused(arguments: list[Any], value: str) -> None:
    with pytest.raises(InputError, match=value):
        check(arguments[0], only=arguments[1] if len(arguments) > 1 else None)


def test_error_of_every_property_is_shown_once() -> None:
    result = check(mine(SGD()), only=["options"])
    row = result.rows[0]._replace(passed=False, detail="no", traceback="trace")
    twice = type(result)("mine", (row, row))
    assert str(twice).count("no\n") == 1
    assert str(twice).count("trace") == 1
