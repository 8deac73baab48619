"""Mistakes in user rules are reported before training, by rule and method, on every engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Algorithm, InputError, Task, Tree, Trial, draw, simulate
from fedzmg.algorithms import SGD, Average, Prox, ZeroMean
from fedzmg.contract import ClientRule, Number, ServerRule, number
from fedzmg.messages import ClientContext, Cohort, Upload
from fedzmg.wrappers.wrapper import Wrapper


def task() -> Task:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), rng.integers(0, 3, 12)
    return Task.from_arrays(
        nn.Linear(4, 3), x, y, np.arange(12) % 3, test=(x, y), cohort=2, batch_size=4, rounds=1
    )


@dataclass(frozen=True)
class Mine(ClientRule):
    lr: Number = number(0.1, above=0, doc="learning rate")

    def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
        return params - self.lr * grad, scratch


@dataclass(frozen=True)
class Own(ServerRule):
    lr: Number = number(1.0, above=0, doc="learning rate")

    def update(self, params: Tree, state: Any, cohort: Cohort) -> Any:
        return params - self.lr * cohort.delta, state


def rule(base: type, name: str, **methods: Any) -> Any:
    """Make a rule class of a name with other methods."""
    for method, function in methods.items():
        if method == "needs":
            continue
        function.__code__ = function.__code__.replace(co_name=method)
    return dataclass(frozen=True)(type(name, (base,), methods))


def client(name: str, step: Callable[..., Any] | None = None, **methods: Any) -> Any:
    return rule(Mine, name, **({"step": step} if step else {}), **methods)()


GENERATOR, COUNTER = np.random.default_rng(0), itertools.count()


def first_is_zero(leaf: torch.Tensor) -> torch.Tensor:
    leaf[0] = 0
    return leaf


HERE = r"^\S*test_dry_run.py:\d+: "
"""File and line of the rule that is to blame."""
without_state = client("WithoutState", lambda self, _, params, scratch, grad: params - grad)
misspells = client("Misspells", lambda self, _, params, scratch, grad: (self.rate, scratch))
around = rule(Wrapper, "Around", step=lambda self, c, p, s, grad: self.inner.step(c, p, s, None))
CLIENTS = {
    without_state: r"WithoutState.step returned a Tree of weight, bias: ",
    client("WithoutReturn", lambda *_: None): r"WithoutReturn.step returned None: ",
    client("OtherState", lambda self, _, params, scratch, grad: (params, grad)):
        r"OtherState.step returned \(.*, a Tree of weight, bias\): expected \(.*, \(\)\)",
    client("PlainDict", lambda self, _, params, scratch, grad: (dict(params), scratch)):
        r"PlainDict.step returned \(a dict, \(\)\): expected \(a Tree of weight, bias, ",
    client("Flat", lambda self, _, p, scratch, grad: (p.map(lambda w: w.flatten()), scratch)):
        r"Flat.step .* of weight = .*\(12,\), \(\)\): .* of weight = .*\(3, 4\), \(\)\)",
    client("Sums", lambda self, _, p, scratch, grad: (p.map(lambda w: w.sum(0)), scratch)):
        r"Sums.step .* weight = .*\(4,\), bias = .*\(\), \(\)\): .* weight = .*\(3, 4\)",
    client("Renames", lambda self, _, p, scratch, grad: (Tree({**p, "b": p["bias"]}), scratch)):
        r"Renames.step .* b = .*\(3,\), ",
    client("Reorders", lambda self, _, p, scratch, grad: (Tree(dict([*p.items()][::-1])), scratch)):
        r"Reorders.step .* of bias, weight, .* of weight, bias, ",
    client("Branches", lambda self, _, p, scratch, grad: (p if self.lr > 0 else grad, scratch)):
        r"Branches.step: .* torch.where",
    client("Reads", lambda self, _, params, scratch, grad: (params * float(self.lr), scratch)):
        r"Reads.step: .* torch.where",
    misspells: r"Misspells.step: AttributeError: .*'rate'",
    client("BeginsWithNone", begin=lambda self, _, full_pass: None):
        r"BeginsWithNone.begin returned None: .*\(\)",
    client("SendsDelta", finish=lambda self, c, params, *_: (c.params - params, c.memory)):
        r"SendsDelta.finish returned \(a Tree of weight, bias, \(\)\): expected \(Upload",
    client("SendsOnly", finish=lambda self, c, params, *_: Upload(c.params - params)):
        r"SendsOnly.finish returned Upload\(a Tree of .*\): ",
    client("Forgets", finish=lambda self, c, params, *_: (Upload(c.params - params), params)):
        r"Forgets.finish returned \(Upload.*, a Tree .*\): expected \(Upload.*, \(\)\)",
    client("SendsNone", finish=lambda self, c, p, *_: (Upload(c.params - p, None), c.memory)):
        r"SendsNone.finish returned \(None, .*\): .*\(\) for nothing",
    client("LacksKey", begin=lambda self, context, _: context.key):
        r"LacksKey.begin: .*needs = frozenset\({'key'}\)",
    client("DrawsOnly", needs=frozenset({"client"}),
           begin=lambda self, c, _: draw.normal(c.key, c.params)):
        r"DrawsOnly.begin: .*needs = frozenset\({'key'}\)",
    ZeroMean(Prox(without_state)): r"WithoutState.step returned a Tree",
    ZeroMean(misspells): r"Misspells.step: AttributeError",
    around(SGD()): r"Around.step: ",
    client("Mutates", lambda self, _, params, s, grad: (grad.map(lambda g: g.add_(1)), s)):
        r"Mutates.step changed its argument grad in place: ",
    client("Assigns", lambda self, _, params, s, grad: (params.map(first_is_zero), s)):
        r"Assigns.step changed its argument context in place: ",
    client("Draws", lambda self, _, params, s, grad: (params.map(torch.randn_like), s)):
        r"Draws.step uses the random generator of torch, ",
    client("Seeds", begin=lambda self, *_: torch.manual_seed(0) and ()):
        r"Seeds.begin uses the random generator of torch, ",
    client("Rolls", lambda self, _, params, s, grad: (params * random.random(), s)):
        r"Rolls.step uses the random generator of Python, ",
    client("Normal", lambda self, _, params, s, grad: (params + np.random.normal(), s)):  # noqa: NPY002
        r"Normal.step uses the random generator of NumPy, ",
    client("Own", lambda self, _, params, s, grad: (params + GENERATOR.normal(), s)):
        r"Own.step returned different values for the same arguments: ",
    client("Counts", lambda self, _, params, s, grad: (params * next(COUNTER), s)):
        r"Counts.step returned different values for the same arguments: ",
    client("Roots", lambda self, _, params, s, grad: ((params - 9).sqrt(), s)):
        r"Roots.step returned NaN or infinity ",
    client("Divides", finish=lambda self, c, p, s, n: (Upload((c.params - p) / (n - 1)), c.memory)):
        r"Divides.finish returned NaN or infinity ",
}  # fmt: skip


@pytest.mark.parametrize("mistaken", CLIENTS, ids=repr)
def test_mistake_of_a_client_rule_is_named(mistaken: ClientRule) -> None:
    with pytest.raises(InputError, match=f"{HERE}{CLIENTS[mistaken]}") as error:
        simulate(task(), Trial(Algorithm("mine", mistaken, Average())))
    assert "\n" not in str(error.value)


@dataclass(frozen=True)
class Bytes(Mine):
    def wire(self, upload: Upload) -> int:
        return sum(leaf.numel() for leaf in upload.delta.values())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_bytes_on_the_wire_are_those_of_one_upload(engine: Any) -> None:
    trials = [Trial(Algorithm("mine", Bytes(), Average(), "uniform"), seed) for seed in (0, 1)]
    for history in simulate(task(), trials, engine=engine):
        assert history.records[0].bytes_up == 2 * 15  # two clients, twelve weights and three biases


def test_rules_that_cannot_be_used_are_refused_at_once() -> None:
    for wrong, named in (
        (client("Asks", needs=frozenset({"keys"})), r"Asks.needs 'keys': .*'key'"),
        (rule(Own, "Asks", needs=frozenset({"steps"}))(), "Asks.needs 'steps'"),
    ):
        sides = (Mine(), wrong) if isinstance(wrong, Own) else (wrong, Own())
        with pytest.raises(InputError, match=named):
            Algorithm("mine", *sides)

    @dataclass
    class Thawed(ClientRule):
        def step(self, context: ClientContext, params: Tree, scratch: Any, grad: Tree) -> Any:
            return params, scratch

    with pytest.raises(InputError, match=r"Thawed .*frozen=True"):
        Algorithm("mine", Thawed(), Own())


SERVERS = {
    rule(Own, "Forgets", update=lambda self, params, state, cohort: params)():
        r"Forgets.update returned a Tree of weight, bias: ",
    rule(Own, "Grows", init=lambda self, params: params["bias"].sum(),
         update=lambda self, params, state, cohort: (params, (state, state)))():
        r"Grows.update returned \(a Tree .*, \(a tensor .*\)\): .*, a tensor of shape \(\)\)",
    rule(Own, "Expects", update=lambda self, params, state, cohort: (*cohort.average, state)[5])():
        r"Expects.update: IndexError",
    rule(Own, "Misnames", update=lambda self, params, state, cohort: (cohort.deltas, state))():
        r"Misnames.update: unknown field of Cohort 'deltas': .*'delta'",
    rule(Own, "Counts", init=lambda self, params: 0)(): r"Counts.init returned a int: ",
}  # fmt: skip


@pytest.mark.parametrize("mistaken", SERVERS, ids=repr)
def test_mistake_of_a_server_rule_is_named(mistaken: ServerRule) -> None:
    with pytest.raises(InputError, match=f"{HERE}{SERVERS[mistaken]}"):
        simulate(task(), Trial(Algorithm("mine", SGD(), mistaken)))


def test_correct_rules_train_as_built_in_ones() -> None:
    mine = simulate(task(), Trial(Algorithm("mine", Mine(), Own())), engine="sequential")
    ours = simulate(task(), Trial.of("fedavg"), engine="sequential")
    torch.testing.assert_close(mine[0].params["weight"], ours[0].params["weight"])


def test_numbers_that_a_layout_changes_are_used() -> None:
    halved = rule(Mine, "Halved", for_layout=lambda self, layout: replace(self, lr=self.lr / 2))
    mine = simulate(task(), Trial(Algorithm("mine", halved(), Own())), engine="sequential")
    ours = simulate(task(), Trial.of("fedavg", client_lr=0.05), engine="sequential")
    torch.testing.assert_close(mine[0].params["weight"], ours[0].params["weight"])


def test_huge_learning_rates_and_infinite_states_are_not_mistakes() -> None:
    waits = rule(Own, "Waits", init=lambda self, params: params["bias"].sum() + torch.inf)()
    for algorithm in (
        Algorithm("mine", Mine(lr=1e38), Own(lr=1e38)),
        Algorithm("mine", Mine(), waits),
    ):
        assert simulate(task(), Trial(algorithm), engine="sequential")
