"""Algorithms whose optimiser lives on both sides: MFL, FedGBO, FedLion, FedCAda, FedAdap.

The answers are loops in plain Python that share nothing with the library, and simpler algorithms
that these equal when a hyper-parameter is at the end of its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from known_answers import ENGINES, close, made, simulation
from torch import Tensor

import fedzmg
from fedzmg import algorithms
from fedzmg.algorithms import ZeroMean
from fedzmg.contract import Algorithm
from fedzmg.simulation import Record
from fedzmg.tree import Tree, row
from golden_problems import P2, quadratic_task

CLIENTS = list(P2["n"])
P2_TASK = quadratic_task(P2)


class After(NamedTuple):
    """State of a trial after a round."""

    params: Tree
    state: Any
    record: Record


def rounds(
    task: fedzmg.Task,
    algorithm: Algorithm,
    *,
    engine: Any = "sequential",
    dtype: torch.dtype = torch.float64,
    count: int = 2,
) -> list[After]:
    sim, kept = simulation(task, algorithm, engine=engine, dtype=dtype), []
    for _ in range(count):
        [record] = sim.run_round().records
        snapshot = row(sim.snapshot, 0)
        kept.append(After(snapshot.params, snapshot.state, record))
    return kept


def statistics(name: str, state: Any) -> dict[str, Tensor]:
    """Server state by the names that the stored traces use."""
    if name.startswith(("mfl", "fedlion")):
        return {"momentum": state["weight"]}
    if name.startswith(("fedgbo", "fedcada")):
        named = {"m": state.first, "v": state.second}
        return {key: tree["weight"] for key, tree in named.items() if tree != ()}
    return {}


# Plain Python, unequal numbers of steps.

Vector = list[float]


def unequal_task(epochs: int = 2) -> fedzmg.Task:
    """Batches of 10 of 10 and 30 equal examples: every step of B is followed by two more."""
    protocol = replace(P2_TASK.protocol, batch_size=10, epochs=epochs)
    return replace(P2_TASK, protocol=protocol)


UNEQUAL = {"A": 2, "B": 6}
SHARES = {"examples": {"A": 0.25, "B": 0.75}, "uniform": {"A": 0.5, "B": 0.5}}


def slope(client: str, w: Vector) -> Vector:
    return [h * (x - c) for h, x, c in zip(P2["H"][client], w, P2["c"][client], strict=True)]


def mean(values: dict[str, Any], weights: str) -> Any:
    shares = SHARES[weights]
    if isinstance(values["A"], list):
        return [sum(shares[c] * values[c][i] for c in CLIENTS) for i in range(len(values["A"]))]
    return sum(shares[c] * values[c] for c in CLIENTS)


class Expected(NamedTuple):
    w: Vector
    kept: dict[str, Vector]


def gbo_by_hand(
    steps: dict[str, int], count: int, *, lr: float, beta1: float | None, beta2: float | None
) -> list[Expected]:
    """Gradients are written down as they are taken; nothing is inverted."""
    eps = 1e-3
    w, m, v = list(P2["w0"]), [0.0, 0.0], [1.0, 1.0]
    found = []
    for _ in range(count):
        ends, taken = {}, []
        for client in CLIENTS:
            x = list(w)
            for _ in range(steps[client]):
                grad = slope(client, x)
                taken.append(grad)
                for i in range(2):
                    move = grad[i]
                    if beta1 is not None:
                        move = beta1 * m[i] + (1 - beta1) * move
                    if beta2 is not None:
                        move = move / (math.sqrt(v[i]) + eps)
                    x[i] -= lr * move
            ends[client] = x
        w = mean(ends, "uniform")
        whole = [sum(grad[i] for grad in taken) / len(taken) for i in range(2)]
        kept = {}
        if beta1 is not None:
            kept["m"] = m = [beta1 * m[i] + (1 - beta1) * whole[i] for i in range(2)]
        if beta2 is not None:
            kept["v"] = v = [beta2 * v[i] + (1 - beta2) * whole[i] ** 2 for i in range(2)]
        found.append(Expected(w, kept))
    return found


def cada_by_hand(
    steps: dict[str, int], count: int, *, psi: Callable[[int], float]
) -> list[Expected]:
    lr, beta1, beta2, eps = 0.1, 0.9, 0.99, 1e-8
    w, m, v, s = list(P2["w0"]), [0.0, 0.0], [0.0, 0.0], 0.0
    found = []
    for r in range(1, count + 1):
        ends: dict[str, dict[str, Any]] = {"w": {}, "m": {}, "v": {}, "s": {}}
        for client in CLIENTS:
            x, a, b = list(w), list(m), list(v)
            for j in range(1, steps[client] + 1):
                grad = slope(client, x)
                for i in range(2):
                    a[i] = beta1 * a[i] + (1 - beta1) * grad[i]
                    b[i] = beta2 * b[i] + (1 - beta2) * grad[i] ** 2
                    top = a[i] / (1 - beta1 ** (s + j) + psi(r))
                    x[i] -= lr * top / (math.sqrt(b[i] / (1 - beta2 ** (s + j) + psi(r))) + eps)
            own = {"w": x, "m": a, "v": b, "s": s + steps[client]}
            for key, value in own.items():
                ends[key][client] = value
        w, m, v, s = (mean(ends[key], "examples") for key in "wmvs")
        found.append(Expected(w, {"m": m, "v": v}))
    return found


def mfl_by_hand(
    steps: dict[str, int], count: int, *, momentum: float, damping: float, weights: str
) -> list[Expected]:
    w, d = list(P2["w0"]), [0.0, 0.0]
    found = []
    for _ in range(count):
        ends, ds = {}, {}
        for client in CLIENTS:
            x, own = list(w), list(d)
            for _ in range(steps[client]):
                grad = slope(client, x)
                own = [momentum * own[i] + (1 - damping) * grad[i] for i in range(2)]
                x = [x[i] - 0.1 * own[i] for i in range(2)]
            ends[client], ds[client] = x, own
        w, d = mean(ends, weights), mean(ds, weights)
        found.append(Expected(w, {"momentum": d}))
    return found


def lion_by_hand(steps: dict[str, int], count: int) -> list[Expected]:
    lr, beta1, beta2 = 0.01, 0.9, 0.99
    w, m = list(P2["w0"]), [0.0, 0.0]
    found = []
    for _ in range(count):
        ends, ms = {}, {}
        for client in CLIENTS:
            x, b = list(w), list(m)
            for _ in range(steps[client]):
                grad = slope(client, x)
                for i in range(2):
                    vote = beta1 * b[i] + (1 - beta1) * grad[i]
                    x[i] -= lr * ((vote > 0) - (vote < 0))
                    b[i] = beta2 * b[i] + (1 - beta2) * grad[i]
            ends[client], ms[client] = x, b
        w, m = mean(ends, "uniform"), mean(ms, "uniform")
        found.append(Expected(w, {"momentum": m}))
    return found


GBO = {
    "fedgbo": {"lr": 0.1, "beta1": 0.9, "beta2": None},
    "fedgbo:rmsprop": {"lr": 0.01, "beta1": None, "beta2": 0.99},
    "fedgbo:adam": {"lr": 0.01, "beta1": 0.9, "beta2": 0.99},
}
ORACLES: dict[str, tuple[Algorithm, Callable[[dict[str, int], int], list[Expected]]]] = {
    **{name: (made(name), partial(gbo_by_hand, **options)) for name, options in GBO.items()},
    "fedcada": (made("fedcada", client_lr=0.1), partial(cada_by_hand, psi=lambda r: 1 / r)),
    "fedcada-exp": (
        made("fedcada", client_lr=0.1, client_psi="exp"),
        partial(cada_by_hand, psi=lambda r: math.exp(-r)),
    ),
    "fedcada:none": (made("fedcada:none", client_lr=0.1), partial(cada_by_hand, psi=lambda _: 0.0)),
    "mfl": (made("mfl"), partial(mfl_by_hand, momentum=0.5, damping=0.0, weights="examples")),
    "mfl:averaging": (
        made("mfl:averaging"),
        partial(mfl_by_hand, momentum=0.9, damping=0.9, weights="uniform"),
    ),
    "fedlion": (made("fedlion", client_lr=0.01), lion_by_hand),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("steps", [{"A": 2, "B": 2}, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ORACLES)
def test_plain_python_agrees(name: str, steps: dict[str, int], engine: str) -> None:
    algorithm, oracle = ORACLES[name]
    task = unequal_task() if steps is UNEQUAL else P2_TASK
    found = rounds(task, algorithm, engine=engine, count=4)
    for after, expected in zip(found, oracle(steps, 4), strict=True):
        assert after.record.steps == sum(steps.values())
        close(after.params["weight"], expected.w)
        held = statistics(name, after.state)
        assert set(held) == set(expected.kept)
        for key, value in held.items():
            close(value, expected.kept[key])


def adap_by_hand(count: int, epochs: int, patience: int) -> list[tuple[Vector, int]]:
    """Full-batch epochs; the model and the epochs run after every round."""

    def loss(client: str, x: Vector) -> float:
        terms = zip(P2["H"][client], x, P2["c"][client], strict=True)
        return sum(0.5 * h * (value - c) ** 2 for h, value, c in terms)

    w, found = list(P2["w0"]), []
    for _ in range(count):
        ends, run = {}, 0
        for client in CLIENTS:
            x, lr, best, bad = list(w), 0.7, loss(client, w), 0
            for _ in range(epochs):
                x = [value - lr * g for value, g in zip(x, slope(client, x), strict=True)]
                run += 1
                now = loss(client, x)
                if now < best - 1e-3:
                    best, bad = now, 0
                else:
                    bad, lr = bad + 1, lr / 2
                if bad >= patience:
                    break
            ends[client] = x
        w = mean(ends, "examples")
        found.append((w, run))
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("patience", [1, 2])
def test_fedadap_stops_and_saves_epochs(patience: int, engine: str) -> None:
    task = quadratic_task(P2, epochs=8)
    algorithm = made("fedadap", client_lr=0.7, client_patience=float(patience))
    expected = adap_by_hand(3, 8, patience)
    assert any(run < 16 for _, run in expected), "nobody stops early"
    for after, (w, run) in zip(
        rounds(task, algorithm, engine=engine, count=3), expected, strict=True
    ):
        close(after.params["weight"], w)
        assert after.record.steps == run


def test_fedgbo_keeps_moments_of_the_gradients_that_a_wrapper_leaves() -> None:
    base = algorithms.get("fedgbo")
    wrapped = replace(base, client=ZeroMean(base.client))
    for after in rounds(unequal_task(), wrapped):
        assert abs(float(after.state.first["weight"].sum())) < 1e-12
        assert float(after.state.first["weight"].abs().min()) > 0.1


# Whole ticks of FedLion.


@pytest.mark.parametrize(("epochs", "width"), [(127, 1), (128, 2)])
def test_ticks_travel_in_the_narrowest_type(epochs: int, width: int) -> None:
    task = quadratic_task(P2, epochs=epochs)
    [after] = rounds(task, made("fedlion"), dtype=torch.float32, count=1)
    assert after.record.bytes_up == 2 * 2 * (4 + width)
