"""Known answers, worked out apart from the library, on both engines.

Traces with client state or shared optimisers are in test_client_state and test_shared_optimizers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from known_answers import (
    DTYPES,
    ENGINES,
    Trace,
    check_local_iterates,
    check_models,
    close,
    cohort,
    named,
)

from fedzmg import algorithms
from fedzmg.algorithms import SGD, Momentum, ReddiAdagrad, ZeroMean, zero_mean
from fedzmg.contract import (
    Algorithm,
)
from fedzmg.tree import Tree
from golden_problems import (
    GOLDEN,
    P2,
    P3,
    TOLERANCE,
    dense_task,
    make_context,
    models,
    quadratic_task,
)

ADAM = {"server_lr": 0.1, "server_beta1": 0.9, "server_beta2": 0.99, "server_eps": 1e-3}
REDDI = {"server_lr": 0.1, "server_beta1": 0.9, "server_beta2": 0.99, "server_tau": 1e-3}
PAPER = {"client_momentum": 0.9, "client_decay": 5e-4}
PLAIN = {"client_momentum": None, "client_decay": None}
REDDI_SERVER = algorithms.get("fedadam:reddi").server


def zero_mean_clients_with_reddi(**options: Any) -> Algorithm:
    return dataclasses.replace(named("fedzmg", **options), name="both", server=REDDI_SERVER)


P2_ENTRIES: dict[str, Algorithm] = {
    "fedavg": named("fedavg"),
    "fedavg_uniform": named("fedavg", weights="uniform"),
    "fedavg_server_lr_0.5": named("fedavg", server_lr=0.5),
    "fedadam_reddi": named("fedadam:reddi", **REDDI),
    "fedadam_reddi_v0": named("fedadam:reddi", **REDDI, server_v0=0.0),
    "fedadam_tff": named("fedadam", **ADAM),
    "fedzmg_pseudocode_lambda0": named("fedzmg", **PLAIN),
    "fedzmg_pseudocode": named("fedzmg", client_momentum=None, client_decay=0.01),
    "fedzmg_momentum": named("fedzmg", client_momentum=0.9, client_decay=None),
    "fedzmg_paper_settings": named("fedzmg", **PAPER),
    "fedavg_momentum_wd": named("fedavg", **PAPER),
    "fedzmg_adam_tff": named("fedzmg-adam", **PAPER, **ADAM),
    "fedzmg_adam_reddi": zero_mean_clients_with_reddi(**PAPER),
}


P3_ENTRIES: dict[str, Algorithm] = {
    "fedavg": named("fedavg"),
    "fedavg_momentum_wd": named("fedavg", **PAPER),
    "fedzmg_lambda0": named("fedzmg", **PLAIN),
    "fedzmg_lambda_0.01": named("fedzmg", client_momentum=None, client_decay=0.01),
    "fedzmg_momentum": named("fedzmg", client_momentum=0.9, client_decay=None),
    "fedzmg_paper_settings": named("fedzmg", **PAPER),
    "fedzmg_server_lr_0.5": named("fedzmg", **PAPER, server_lr=0.5),
    "fedzmg_adam_tff": named("fedzmg-adam", client_momentum=0.9, client_decay=None, **ADAM),
    "fedzmg_adam_tff_projected_server": named(
        "fedzmg-adam:projected", client_momentum=0.9, client_decay=None
    ),
    "fedzmg_adam_reddi": zero_mean_clients_with_reddi(client_momentum=0.9, client_decay=None),
}
DENSE_ENTRIES: dict[str, Algorithm] = {
    "fedavg": named("fedavg"),
    "fedzmg_lambda0": named("fedzmg", **PLAIN),
    "fedzmg_paper_settings": named("fedzmg", **PAPER),
    "fedzmg_paper_settings_no_bias_decay": named("fedzmg", **PAPER, client_decay_scope="kernels"),
    "fedavg_momentum_wd": named("fedavg", **PAPER),
}
SERVER_FAMILY: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "server_family.json").read_text()
)
GC_OFF = {"client.momentum": None, "client.l2": None}
SERVER_ENTRIES: dict[str, Algorithm] = {
    "fedavgm": named("fedavgm"),
    "fedadagrad_reddi": named("fedadagrad:reddi"),
    "fedadam_flower": named("fedadam:flower"),
    "fedyogi_reddi": named("fedyogi:reddi"),
    "fedyogi_tff": named("fedyogi"),
    "fedadagrad_tff": named("fedadagrad"),
    "fedadadb_author_defaults": named("fedadadb"),
    "fedadadb_author_active": named("fedadadb", server_lr=1.0, server_gamma=4.0, server_floor=0.05),
    "fedadadb_original": named(
        "fedadadb:original", server_lr=0.1, server_gamma=1.0, server_floor=0.05
    ),
    "local_gc": named("local-gc").with_options(GC_OFF),
    "global_gc": named("global-gc").with_options(GC_OFF),
}
P2_STORED = {n: e for n, e in GOLDEN["algorithms"].items() if "rounds" in e}
TRACES = [
    pytest.param(Trace(problem, algorithm, stored[name]["rounds"]), id=f"{prefix}{name}")
    for problem, entries, stored, prefix in (
        (P2, P2_ENTRIES, P2_STORED, ""),
        (P3, P3_ENTRIES, GOLDEN["p3"]["algorithms"], "p3-"),
        (P2, SERVER_ENTRIES, SERVER_FAMILY, ""),
    )
    for name, algorithm in entries.items()
]


def test_every_stored_trace_is_used() -> None:
    assert set(P2_STORED) == set(P2_ENTRIES)
    assert set(GOLDEN["p3"]["algorithms"]) == set(P3_ENTRIES)
    assert set(GOLDEN["dense_layer"]) - {"problem"} == set(DENSE_ENTRIES)
    assert set(SERVER_FAMILY) == set(SERVER_ENTRIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trace", TRACES)
def test_model_after_every_round(trace: Trace, engine: str, dtype: torch.dtype) -> None:
    check_models(trace, engine, dtype)


@pytest.mark.parametrize("trace", TRACES)
def test_local_iterates(trace: Trace) -> None:
    check_local_iterates(trace)


@pytest.mark.parametrize("trace", [t for t in TRACES if "delta" in t.values[0].rounds[0]])
def test_server_alone(trace: Trace) -> None:
    """The server rule on the stored deltas: model, velocity, moments, sums of squares."""
    problem, algorithm, rounds = trace
    rule = algorithm.for_layout(quadratic_task(problem).model.layout).server
    params = Tree({"weight": torch.tensor([problem["w0"]], dtype=torch.float64)})
    state = rule.init(params)
    # Published forms keep the moments of the update, the library those of the pseudo-gradient.
    sign = -1.0 if type(rule).__name__.startswith(("Reddi", "Momentum")) else 1.0
    for expected in rounds:
        delta = -torch.tensor([expected["delta"]], dtype=torch.float64)
        params, state = rule.update(params, state, cohort(delta, expected["round"], "weight"))
        close(params["weight"], expected["w"])
        if "v" in expected and isinstance(rule, Momentum):
            close(sign * state["weight"], expected["v"])
        elif "v" in expected:
            close((state if isinstance(state, Tree) else state.second)["weight"], expected["v"])
        if "m" in expected and not isinstance(rule, ReddiAdagrad):
            close(sign * state.first["weight"], expected["m"])
            assert float(state.steps) == expected["round"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", DENSE_ENTRIES)
def test_dense_layer(name: str, engine: str, dtype: torch.dtype) -> None:
    found = models(dense_task(), DENSE_ENTRIES[name], engine=engine, dtype=dtype)
    rounds = GOLDEN["dense_layer"][name]
    assert len(found) == len(rounds) == 2
    for model, expected in zip(found, rounds, strict=True):
        close(model["weight"].T.contiguous(), expected["W"], TOLERANCE[dtype])
        close(model["bias"], expected["b"], TOLERANCE[dtype])
        close(model["weight"].sum(1), expected["column_sums"], TOLERANCE[dtype])


@pytest.mark.parametrize(
    "name", [n for n, e in GOLDEN["algorithms"]["projection_tensors"].items() if "grad" in e]
)
def test_projection_tensors(name: str) -> None:
    entry = GOLDEN["algorithms"]["projection_tensors"][name]
    axes = tuple(entry["axes"]) if "axes" in entry else (entry["axis"],)
    grad = torch.tensor(entry["grad"], dtype=torch.float64).reshape(entry["shape"])
    close(zero_mean(grad, axes), entry["projected"])
    close(zero_mean(grad.float(), axes), entry["projected"], TOLERANCE[torch.float32])
    if "means" in entry:
        close(grad.mean(axes), entry["means"])


def test_dense_identity() -> None:
    """Projecting a kernel's gradient is the gradient on inputs centred example by example."""
    entry = GOLDEN["algorithms"]["dense_identity"]
    x = torch.tensor(entry["X"], dtype=torch.float64).reshape(2, 3)
    signal = torch.tensor(entry["delta"], dtype=torch.float64).reshape(2, 2)
    layer = torch.nn.Linear(3, 2).double()
    layer(x).backward(signal)
    assert layer.weight.grad is not None
    close(layer.weight.grad.T.contiguous(), entry["raw"])
    close(zero_mean(layer.weight.grad, (1,)).T.contiguous(), entry["projected"])
    centred = x - x.mean(1, keepdim=True)
    close((signal.T @ centred).T.contiguous(), entry["projected"])


def test_projection_and_momentum_commute() -> None:
    """Projecting the gradient (the library) or the buffer (here) gives the stored iterates."""
    stored = GOLDEN["algorithms"]["projection_momentum_commute"]["iterates"]
    curvature, centre, start = (
        torch.tensor([v], dtype=torch.float64) for v in (P2["H"]["A"], P2["c"]["A"], P2["w0"])
    )
    sent = Tree({"weight": start})
    rule = ZeroMean(SGD(lr=0.1, momentum=0.9), axes={"weight": (1,)})
    params, scratch = sent, rule.begin(make_context(sent), ())
    by_buffer, buffer = start.clone(), torch.zeros_like(start)
    for iterate in stored:
        grad = Tree({"weight": curvature * (params["weight"] - centre)})
        params, scratch = rule.step(make_context(sent), params, scratch, grad)
        buffer = 0.9 * buffer + curvature * (by_buffer - centre)
        by_buffer = by_buffer - 0.1 * (buffer - buffer.mean())
        close(params["weight"], iterate)
        close(by_buffer, iterate)
