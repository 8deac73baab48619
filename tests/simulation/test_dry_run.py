"""Slips in rules of one's own are said before training, by rule and method, on every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Algorithm, InputError, Task, Tree, Trial, simulate
from fedzmg.algorithms import SGD, Average, Prox, ZeroMean
from fedzmg.algorithms.wrapper import Wrapper
from fedzmg.contract import ClientContext, ClientRule, Cohort, Number, ServerRule, Upload, number


def task() -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.integers(0, 3, 12)
    return Task.from_arrays(
        nn.Linear(4, 3), x, y, np.arange(12) % 3, test=(x, y), cohort=2, batch_size=4, rounds=1
    )


@dataclass(frozen=True)
class Mine(ClientRule):
    lr: Number = number(0.1, above=0, doc="rate")

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad, scratch


@dataclass(frozen=True)
class WithoutState(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad


@dataclass(frozen=True)
class WithoutReturn(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        params - self.lr * grad


@dataclass(frozen=True)
class OtherState(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad, grad


@dataclass(frozen=True)
class PlainDict(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return {name: params[name] - self.lr * grad[name] for name in params}, scratch


@dataclass(frozen=True)
class Branches(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return (params - self.lr * grad if self.lr > 0 else params), scratch


@dataclass(frozen=True)
class Reads(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - float(self.lr) * grad, scratch


@dataclass(frozen=True)
class Misspells(Mine):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.rate * grad, scratch  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BeginsWithNone(Mine):
    def begin(self, context: ClientContext, full_pass: Any) -> Any:
        return None


@dataclass(frozen=True)
class SendsDelta(Mine):
    def finish(self, context: ClientContext, params: Tree, scratch: Any, steps: Any) -> Any:
        return context.params - params, context.memory


@dataclass(frozen=True)
class SendsOnly(Mine):
    def finish(self, context: ClientContext, params: Tree, scratch: Any, steps: Any) -> Any:
        return Upload(context.params - params)


@dataclass(frozen=True)
class Around(Wrapper):
    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return self.inner.step(context, params, scratch, None)  # type: ignore[arg-type]


CLIENTS = {
    WithoutState(): r"WithoutState.step returned a Tree of weight, bias: return the parameters and",
    WithoutReturn(): r"WithoutReturn.step returned None: return the parameters and the state",
    OtherState(): r"OtherState.step returned a Tree of weight, bias as state: expected the form of "
    r"what begin gave, \(\)",
    PlainDict(): r"PlainDict.step returned a dict as parameters: expected the form of what it was "
    r"given, a Tree of weight, bias",
    Branches(): r"Branches.step: the numbers of a rule are tensors .* torch.where, not with if",
    Reads(): r"Reads.step: the numbers of a rule are tensors",
    Misspells(): r"Misspells.step: AttributeError: 'Misspells' object has no attribute 'rate'",
    BeginsWithNone(): r"BeginsWithNone.begin returned None: return tensors, .* \(\) for nothing",
    SendsDelta(): r"SendsDelta.finish returned a Tree of weight, bias: return an upload",
    SendsOnly(): r"SendsOnly.finish returned \(a Tree of .*\): return an upload and the memory",
    ZeroMean(Prox(WithoutState())): r"WithoutState.step returned a Tree",
    ZeroMean(Misspells()): r"Misspells.step: AttributeError",
    Around(SGD()): r"Around.step: ",
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "vectorized"])
@pytest.mark.parametrize("rule", CLIENTS, ids=repr)
def test_slip_of_a_client_rule_is_named(rule: ClientRule, engine: Any) -> None:
    with pytest.raises(InputError, match=f"^{CLIENTS[rule]}") as error:
        simulate(task(), Trial(Algorithm("mine", rule, Average())), engine=engine)
    assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Own(ServerRule):
    lr: Number = number(1.0, above=0, doc="rate")

    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        return params - self.lr * cohort.delta, state


@dataclass(frozen=True)
class Forgets(Own):
    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        return params - self.lr * cohort.delta


@dataclass(frozen=True)
class Grows(Own):
    def init(self, params: Tree) -> Any:
        return params.zeros()["bias"].sum()

    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        return params - self.lr * cohort.delta, (state, state)


@dataclass(frozen=True)
class Expects(Own):
    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        mean, count = cohort.average
        return params - self.lr * mean / count, state


@dataclass(frozen=True)
class Counts(Own):
    def init(self, params: Tree) -> Any:
        return 0


SERVERS = {
    Forgets(): r"Forgets.update returned a Tree of weight, bias: return the next model and",
    Grows(): r"Grows.update returned \(a tensor of shape \(\), a tensor of shape \(\)\) as state: "
    r"expected the form of what init gave, a tensor of shape \(\)",
    Expects(): r"Expects.update: ValueError: not enough values to unpack",
    Counts(): r"Counts.init returned a int: return tensors",
}


@pytest.mark.parametrize("rule", SERVERS, ids=repr)
def test_slip_of_a_server_rule_is_named(rule: ServerRule) -> None:
    with pytest.raises(InputError, match=f"^{SERVERS[rule]}"):
        simulate(task(), Trial(Algorithm("mine", SGD(), rule)))


def test_rules_without_a_slip_train_to_the_same_bits_as_the_table_s() -> None:
    mine = simulate(task(), Trial(Algorithm("mine", Mine(), Own())), engine="sequential")
    ours = simulate(task(), Trial.of("fedavg"), engine="sequential")
    assert torch.equal(mine[0].params["weight"], ours[0].params["weight"])
