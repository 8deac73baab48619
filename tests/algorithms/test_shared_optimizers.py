"""Algorithms whose optimiser lives on both sides: MFL, FedGBO, FedLion, FedCAda, FedAdap.

Three kinds of answers: stored traces, loops in plain Python that share nothing with the library,
and algorithms that these turn into when a hyper-parameter is at the end of its range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from known_answers import DTYPES, ENGINES, close, made
from torch import Tensor, nn

import fedzmg
from fedzmg import algorithms
from fedzmg.algorithms import ZeroMean
from fedzmg.algorithms.fedgbo import FedGBOServer, FrozenSteps
from fedzmg.contract import Algorithm, ClientContext, Cohort, FullPass, Upload
from fedzmg.simulation import Record, RoundReport
from fedzmg.tree import Tree, row, tree_map
from golden_problems import P2, TOLERANCE, make_context, quadratic_task

STORED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "shared_optimizers.json").read_text()
)
CLIENTS = list(P2["n"])
P2_TASK = quadratic_task(P2)


MOMENTS = {"client_lr": 0.1, "client_beta1": 0.9, "client_beta2": 0.99, "client_eps": 1e-8}
GOLDEN: dict[str, Algorithm] = {
    "mfl_heavy_ball": made("mfl", client_lr=0.1, client_momentum=0.5),
    "mfl_ema": made("mfl:averaging", client_lr=0.1, client_momentum=0.5),
    "fedgbo_sgdm": made("fedgbo", client_lr=0.1, server_beta1=0.9),
    "fedgbo_adam": made(
        "fedgbo:adam", client_lr=0.1, server_beta1=0.9, server_beta2=0.99, server_eps=1e-3
    ),
    "fedlion": made("fedlion", client_lr=0.01, client_beta1=0.9, client_beta2=0.99),
    "fedcada_no_adjust": made("fedcada:none", **MOMENTS),
    "fedcada_inverse_round": made("fedcada", **MOMENTS),
    "fedadap_inferred": made(
        "fedadap",
        client_lr=0.7,
        client_factor=0.5,
        client_patience=3.0,
        client_min_delta=1e-3,
    ),
}
STEPS = {name: 6 if name == "fedadap_inferred" else 2 for name in GOLDEN}


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
    kept: list[After] = []

    def keep(report: RoundReport) -> None:
        snapshot = row(report.simulation.snapshot, 0)
        kept.append(After(snapshot.params, snapshot.state, report.records[0]))

    fedzmg.simulate(
        task,
        [fedzmg.Trial(algorithm)],
        rounds=count,
        engine=engine,
        device="cpu",
        dtype=dtype,
        observer=keep,
    )
    return kept


def statistics(name: str, state: Any) -> dict[str, Tensor]:
    """Server state by the names that the stored traces use."""
    if name.startswith(("mfl", "fedlion")):
        return {"momentum": state["weight"]}
    if name.startswith(("fedgbo", "fedcada")):
        named = {"m": state.first, "v": state.second}
        return {key: tree["weight"] for key, tree in named.items() if tree != ()}
    return {}


def test_every_stored_trace_is_used() -> None:
    assert set(STORED) == set(GOLDEN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GOLDEN)
def test_model_and_server_state_after_every_round(
    name: str, engine: str, dtype: torch.dtype
) -> None:
    task = quadratic_task(P2, epochs=STEPS[name])
    found = rounds(task, GOLDEN[name], engine=engine, dtype=dtype)
    for after, expected in zip(found, STORED[name]["rounds"], strict=True):
        close(after.params["weight"], expected["w"], TOLERANCE[dtype])
        held = statistics(name, after.state)
        assert set(held) == {"momentum", "m", "v"} & set(expected)
        for key, value in held.items():
            # Undoing a step divides rounding errors by lr (1 - beta1).
            close(value, expected[key], 1e-9 if dtype == torch.float64 else 1e-4)
        if "clients" in expected:
            run = sum(client["epochs_run"] for client in expected["clients"].values())
            assert after.record.steps == run


class Trained(NamedTuple):
    """One client's round, driven by hand."""

    iterates: list[Tree]
    scratches: list[Any]
    losses: list[Tensor]
    upload: Upload


def trained(rule: Any, client: str, context: ClientContext, steps: int) -> Trained:
    """Full-batch steps, each of them an epoch."""
    curvature, centre = (torch.tensor([P2[key][client]], dtype=torch.float64) for key in ("H", "c"))

    def loss(params: Tree) -> Tensor:
        return 0.5 * (curvature * (params["weight"] - centre) ** 2).sum()

    full_pass = FullPass(loss(context.params), ()) if rule.full_pass == "epochs" else ()
    params, scratch = context.params, rule.begin(context, full_pass)
    iterates, scratches, losses = [], [scratch], []
    for _ in range(steps):
        grad = Tree({"weight": curvature * (params["weight"] - centre)})
        params, scratch = rule.step(context, params, scratch, grad)
        iterates.append(params)
        losses.append(loss(params))
        scratch, go_on = rule.end_epoch(scratch, losses[-1])
        scratches.append(scratch)
        if not go_on:
            break
    upload, _ = rule.finish(context, params, scratch, torch.tensor(len(iterates)))
    return Trained(iterates, scratches, losses, upload)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_client_by_hand(name: str) -> None:
    """Local iterates, ticks, losses and rates where they are stored; then the server alone."""
    algorithm = GOLDEN[name]
    params = Tree({"weight": torch.tensor([P2["w0"]], dtype=torch.float64)})
    state = algorithm.server.init(params)
    shares = P2["p_weighted"] if algorithm.weights == "examples" else {"A": 0.5, "B": 0.5}
    for expected in STORED[name]["rounds"]:
        uploads = []
        for client in CLIENTS:
            context = make_context(params, shared=algorithm.server.share(state))
            context = context._replace(round=torch.tensor(expected["round"]))
            seen = trained(algorithm.client, client, context, STEPS[name])
            uploads.append(seen.upload)
            wanted = expected.get("local_iterates", {}).get(client, [])
            for got, iterate in zip(seen.iterates, wanted, strict=bool(wanted)):
                close(got["weight"], iterate)
            if "integer_update" in expected:
                assert seen.upload.delta["weight"].tolist() == [expected["integer_update"][client]]
                # The ticks and the rate say where the client is.
                away = seen.upload.average[1] * seen.upload.delta["weight"]
                torch.testing.assert_close(params["weight"] - away, seen.iterates[-1]["weight"])
            if "clients" in expected:
                facts = expected["clients"][client]
                assert len(seen.losses) == facts["epochs_run"]
                close(torch.stack(seen.losses), facts["losses"])
                close(torch.stack([s.lr for s in seen.scratches[:-1]]), facts["lr_used"])
                close(seen.iterates[-1]["weight"], facts["w"])
        merged: Upload = tree_map(
            lambda *parts: sum(shares[c] * part for c, part in zip(CLIENTS, parts, strict=True)),
            *uploads,
        )
        two = torch.tensor(2)
        cohort = Cohort(*merged, two, two, torch.tensor(expected["round"]))
        if "recovered_mean_gradient" in expected:
            assert isinstance(algorithm.server, FedGBOServer)
            mean_step = cohort.delta / cohort.average
            grad = algorithm.server.share(state).gradient(mean_step)
            close(grad["weight"], expected["recovered_mean_gradient"])
        params, state = algorithm.server.update(params, state, cohort)
        close(params["weight"], expected["w"])
        for key, value in statistics(name, state).items():
            close(value, expected[key])


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


# What they turn into at the ends of their ranges.


def ragged_task(**protocol: Any) -> fedzmg.Task:
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(5), [5, 12, 8, 3, 1])
    x, y = rng.normal(size=(len(owner), 3)), rng.integers(0, 2, len(owner))
    settings = {"batch_size": 4, "epochs": 3, "cohort": 3, "rounds": 3, **protocol}
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))
    return fedzmg.Task.from_arrays(network, x, y, owner, test=(x, y), **settings)


STILL = {"client_factor": 1.0, "client_patience": 1e9}
DEGENERATE = {
    "mfl gamma 0": (made("mfl", client_momentum=0.0), "examples"),
    "mfl:averaging beta 0": (made("mfl:averaging", client_momentum=0.0), "uniform"),
    "fedgbo beta 0": (made("fedgbo", server_beta1=0.0), "uniform"),
    "fedgbo without moments": (
        Algorithm("bare", FrozenSteps(0.1), FedGBOServer(), weights="uniform"),
        "uniform",
    ),
    "fedadap never bad": (made("fedadap", **STILL), "examples"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_cases_are_fedavg_bit_for_bit(case: str, engine: str) -> None:
    algorithm, weights = DEGENERATE[case]
    plain = made("fedavg", weights=weights)
    for dtype in DTYPES:
        one, other = (
            rounds(ragged_task(), a, engine=engine, dtype=dtype, count=3)
            for a in (algorithm, plain)
        )
        for a, b in zip(one, other, strict=True):
            assert all(torch.equal(a.params[name], b.params[name]) for name in a.params)


def test_fedgbo_keeps_moments_of_the_gradients_that_a_wrapper_leaves() -> None:
    base = algorithms.get("fedgbo")
    wrapped = replace(base, client=ZeroMean(base.client))
    for after in rounds(unequal_task(), wrapped):
        assert abs(float(after.state.first["weight"].sum())) < 1e-12
        assert float(after.state.first["weight"].abs().min()) > 0.1


# What only FedLion has: whole ticks.


@pytest.mark.parametrize(("epochs", "width"), [(127, 1), (128, 2)])
def test_ticks_travel_in_the_narrowest_type(epochs: int, width: int) -> None:
    task = quadratic_task(P2, epochs=epochs)
    [after] = rounds(task, made("fedlion"), dtype=torch.float32, count=1)
    assert after.record.bytes_up == 2 * 2 * (4 + width)
