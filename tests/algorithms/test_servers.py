"""Server rules: oracles of plain floats and torch, weight decay, degenerate cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given as hypotheses
from hypothesis import settings
from hypothesis import strategies as st
from known_answers import ENGINES, close, cohort, drive, named
from torch import nn

from fedzmg import algorithms
from fedzmg.algorithms import (
    AdaDB,
    Adagrad,
    Adam,
    Momentum,
    Projected,
    ReddiAdagrad,
    ReddiAdam,
    ReddiYogi,
    Yogi,
)
from fedzmg.algorithms.options import configure
from fedzmg.contract import numbers
from fedzmg.errors import InputError
from fedzmg.tree import Tree
from fedzmg.wrappers.wrapper import ServerDecay
from golden_problems import P3, models, quadratic_task

START = [1.0, -2.0, 0.25]

update = st.lists(
    st.floats(-4, 4).map(lambda v: 0.0 if abs(v) < 1e-6 else v), min_size=3, max_size=3
)
updates = st.lists(update, min_size=1, max_size=5)


def plain_adam(
    start: list[float], deltas: list[list[float]], rule: Adam | ReddiAdam
) -> list[list[float]]:
    """Adam on pseudo-gradients, one coordinate at a time, in plain floats."""
    lr, b1, b2, small, *_ = (float(v) for v in numbers(rule).values())
    second = 0.0
    if isinstance(rule, ReddiAdam):
        second = small**2 if rule.v0 is None else float(rule.v0)
    w, m, v = list(start), [0.0] * len(start), [second] * len(start)
    found = []
    for t, delta in enumerate(deltas, 1):
        rate = lr * (math.sqrt(1 - b2**t) / (1 - b1**t) if isinstance(rule, Adam) else 1)
        for i, g in enumerate(delta):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
            if m[i] != 0:
                w[i] -= rate * m[i] / (math.sqrt(v[i]) + small)
        found.append(list(w))
    return found


betas = st.one_of(st.just(0.0), st.floats(0.01, 0.999))


@hypotheses(
    updates,
    st.floats(1e-3, 1),
    betas,
    betas,
    st.floats(1e-5, 0.1),
    st.one_of(st.none(), st.floats(0, 1)),
    st.booleans(),
)
@settings(max_examples=60)
def test_adam_against_plain_floats(
    deltas: list[list[float]],
    lr: float,
    beta1: float,
    beta2: float,
    small: float,
    v0: float | None,
    bound: bool,
) -> None:
    for rule in (Adam(lr, beta1, beta2, small), ReddiAdam(lr, beta1, beta2, small, v0)):
        found = drive(rule, START, deltas, bound=bound)
        for left, right in zip(found, plain_adam(START, deltas, rule), strict=True):
            assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


def plain_adadb(start: list[float], deltas: list[list[float]], rule: AdaDB) -> list[list[float]]:
    """AdaDB one coordinate at a time, in plain floats."""
    lr, b1, b2, gamma, floor = (float(v) for v in numbers(rule).values())
    w, m, v = list(start), [0.0] * len(start), [0.0] * len(start)
    found = []
    for t, delta in enumerate(deltas, 1):
        for i, g in enumerate(delta):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g * g
        a = lr
        if rule.correction == "double":
            a *= math.sqrt(1 - b2**t) / (1 - b1**t)
        largest = max(abs(x) for x in m)
        for i, first in enumerate(m):
            if largest == 0:
                continue
            root = math.sqrt(v[i] / (1 - b2**t))
            width = abs(first) / (gamma * (t if rule.bound == "inverse_round" else 1) * largest)
            rate = min(max(a / root if root else math.inf, floor), floor + width)
            w[i] -= rate * first / (1 - b1**t)
        found.append(list(w))
    return found


@hypotheses(
    updates,
    st.floats(1e-3, 2),
    st.floats(1e-2, 10),
    st.floats(0, 1),
    st.sampled_from(["constant", "inverse_round"]),
    st.sampled_from(["double", "single"]),
    st.booleans(),
)
@settings(max_examples=60)
def test_adadb_against_plain_floats(
    deltas: list[list[float]],
    lr: float,
    gamma: float,
    floor: float,
    bound: Any,
    correction: Any,
    as_tensors: bool,
) -> None:
    rule = AdaDB(lr, 0.9, 0.999, gamma, floor, bound, correction)
    found = drive(rule, START, deltas, bound=as_tensors)
    for left, right in zip(found, plain_adadb(START, deltas, rule), strict=True):
        assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("bound", ["constant", "inverse_round"])
@pytest.mark.parametrize("correction", ["double", "single"])
def test_adadb_leaves_a_tensor_without_updates_alone(bound: Any, correction: Any) -> None:
    """Whatever another tensor of the model does, and with the bound of that one tensor."""
    rule = AdaDB(bound=bound, correction=correction, gamma=4.0, floor=0.05)
    params = Tree({"still": torch.ones(2, 3), "moving": torch.ones(2)})
    alone = drive(rule, [1.0, 1.0], [[0.5, -0.1]] * 2, dtype=torch.float32)
    state = rule.init(params)
    for round_ in range(2):
        delta = Tree({"still": torch.zeros(2, 3), "moving": torch.tensor([0.5, -0.1])})
        context = cohort(delta, round_ + 1)
        params, state = rule.update(params, state, context)
        assert torch.equal(params["still"], torch.ones(2, 3))
        assert params["moving"].tolist() == alone[round_]


def test_server_momentum_against_torch() -> None:
    """The accumulating form is that of ``torch.optim.SGD``."""
    deltas = [[0.5, -2.0], [0.25, 1.0], [-1.0, 0.0]]
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.3, momentum=0.9)
    for delta, found in zip(deltas, drive(Momentum(0.3, 0.9), [1.0, -1.0], deltas), strict=True):
        weight.grad = torch.tensor(delta, dtype=torch.float64)
        optimizer.step()
        assert found == pytest.approx(weight.tolist(), abs=1e-12)


SIGN_STEPS = {
    "adam": Adam(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0),
    "adam-reddi": ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0),
    "adam-reddi-v0": ReddiAdam(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0, v0=0.0),
    "yogi": Yogi(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0, v0=0.0),
    "yogi-reddi": ReddiYogi(lr=0.5, beta1=0.0, beta2=0.0, tau=0.0),
    "adagrad": Adagrad(lr=0.5, eps=0.0, v0=0.0),
    "adagrad-reddi": ReddiAdagrad(lr=0.5, tau=0.0),
    "adagrad-reddi-moment": ReddiAdagrad(lr=0.5, beta1=0.0, tau=0.0),
    "adam-flower": Adam(lr=0.5, beta1=0.0, beta2=0.0, eps=0.0, exponent="next_step"),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("name", SIGN_STEPS)
def test_no_memory_and_nothing_added_is_a_sign_step(name: str, bound: bool) -> None:
    """In the first round; a coordinate that never moved stays, and is not NaN."""
    deltas = [[3.0, -0.001, 0.0], [0.0, 0.0, 0.0]]
    found = drive(SIGN_STEPS[name], [0.0, 1.0, 4.0], deltas, bound=bound)
    assert found[0] == pytest.approx([-0.5, 1.5, 4.0], abs=1e-12)
    assert found[1] == pytest.approx([-0.5, 1.5, 4.0], abs=1e-12)


# Weight decay.


DELTAS = [[0.5, -2.0], [0.25, 1.0], [-1.0, 0.5]]


@hypotheses(st.floats(0.01, 0.5), st.floats(0, 1), st.booleans())
@settings(max_examples=20)
def test_adam_with_decay_is_torchs_adamw(lr: float, decay: float, bound: bool) -> None:
    """Without an epsilon, which the two put in different places."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, 0.99), eps=0.0, weight_decay=decay)
    rule = ServerDecay(Adam(lr, 0.9, 0.99, 0.0), decay)
    for delta, found in zip(DELTAS, drive(rule, [1.0, -1.0], DELTAS, bound=bound), strict=True):
        weight.grad = torch.tensor(delta, dtype=torch.float64)
        optimizer.step()
        assert found == pytest.approx(weight.tolist(), abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_of_columns_shrink_where_a_clients_decay_would_be_undone(engine: str) -> None:
    """By ``1 - decay lr`` a round; the moments of the server see nothing of it."""
    task, start = quadratic_task(P3), sum(P3["w0"])
    bare = named("fedzmg-adam:projected", client_decay=None)
    decayed = configure(bare, {"server.decay": 0.5})
    for round_, model in enumerate(models(task, decayed, engine=engine, rounds=3), 1):
        close(model["weight"].sum(), start * (1 - 0.5 * 0.1) ** round_, 1e-12)
    on_clients = bare.with_options({"client.decay": 0.5})
    for model in models(task, on_clients, engine=engine, rounds=3):
        close(model["weight"].sum(), start, 1e-12)


def test_decay_is_outside_of_a_projection() -> None:
    inner = Projected(Adam())
    found = configure(algorithms.get("fedzmg-adam:projected"), {"server.decay": 0.01})
    assert found.server == ServerDecay(inner, 0.01)
    assert found.options()["server.decay"] == 0.01


@pytest.mark.parametrize("name", ["feddyn", "adabest", "mfl", "fedlion"])
def test_a_server_without_a_rate_is_rejected(name: str) -> None:
    algorithm = algorithms.get(name)
    with pytest.raises(
        InputError, match=f"{name}, server.decay: .*{type(algorithm.server).__name__}"
    ):
        configure(algorithm, {"server.decay": 0.1})
