"""Known answers, worked out apart from the library, by hand and on both engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from known_answers import close, named, simulation
from torch import Tensor

from fedzmg import algorithms
from fedzmg.algorithms import SGD, ZeroMean, zero_mean
from fedzmg.contract import Algorithm, chain
from fedzmg.engine import local
from fedzmg.engine.aggregate import Merger
from fedzmg.messages import Cohort
from fedzmg.tree import Tree, leaves, row, tree_map
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
SERVER_FAMILY, CLIENT_STATE, SHARED = (
    json.loads((Path(__file__).parents[1] / "golden" / f"{name}.json").read_text())
    for name in ("server_family", "client_state", "shared_optimizers")
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
CLIENT_STATE_ENTRIES: dict[str, Algorithm] = {
    "fedprox": named("fedprox", client_mu=0.5),
    "scaffold_option2": named("scaffold"),
    "scaffold_option1": named("scaffold:option-1"),
    "scaffold_option2_partial": named("scaffold"),
    "feddyn": named("feddyn", client_alpha=0.1),
    "feddyn_partial": named("feddyn", client_alpha=0.1),
    "mimelite_momentum": named("mimelite", server_beta=0.9),
    "adabest": named("adabest", client_mu=0.1, server_beta=0.8),
    "adabest_partial": named("adabest", client_mu=0.1, server_beta=0.8),
}
MOMENTS = {"client_beta1": 0.9, "client_beta2": 0.99, "client_eps": 1e-8}
SHARED_ENTRIES: dict[str, Algorithm] = {
    "mfl_heavy_ball": named("mfl", client_momentum=0.5),
    "mfl_ema": named("mfl:averaging", client_momentum=0.5),
    "fedgbo_sgdm": named("fedgbo", server_beta1=0.9),
    "fedgbo_adam": named("fedgbo:adam", server_beta1=0.9, server_beta2=0.99, server_eps=1e-3),
    "fedlion": named("fedlion", client_lr=0.01, client_beta1=0.9, client_beta2=0.99),
    "fedcada_no_adjust": named("fedcada:none", **MOMENTS),
    "fedcada_inverse_round": named("fedcada", **MOMENTS),
    "fedadap_inferred": named(
        "fedadap", client_lr=0.7, client_factor=0.5, client_patience=3.0, client_min_delta=1e-3
    ),
}
PATHS = pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("sequential", torch.float64),
        ("vectorized", torch.float64),
        ("vectorized", torch.float32),
    ],
)
P2_STORED = {n: e for n, e in GOLDEN["algorithms"].items() if "rounds" in e}
TABLES = (
    (P2, P2_ENTRIES, P2_STORED, ""),
    (P3, P3_ENTRIES, GOLDEN["p3"]["algorithms"], "p3-"),
    (P2, SERVER_ENTRIES, SERVER_FAMILY, ""),
    (P2, CLIENT_STATE_ENTRIES, CLIENT_STATE, ""),
    (P2, SHARED_ENTRIES, SHARED, ""),
)
TRACES = [
    pytest.param(problem, algorithm, stored[name]["rounds"], id=f"{prefix}{name}")
    for problem, entries, stored, prefix in TABLES
    for name, algorithm in entries.items()
]


def test_every_stored_trace_is_used() -> None:
    for _, entries, stored, _ in TABLES:
        assert set(stored) == set(entries)
    assert set(GOLDEN["dense_layer"]) - {"problem"} == set(DENSE_ENTRIES)


class Recorder:
    """Local steps, losses of full passes and merged uploads of a round, on either engine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.works: list[Any] = []
        self.losses: list[Any] = []
        self.cohorts: list[Cohort] = []
        for owner, name, kept in (
            (local, "count", self.works),
            (local, "move", self.works),
            (local, "add_full_pass", self.losses),
            (Merger, "cohort", self.cohorts),
        ):
            patch.setattr(owner, name, self._recorded(getattr(owner, name), kept))

    @staticmethod
    def _recorded(function: Any, kept: list[Any]) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            # A later step may change a model in place.
            kept.append(tree_map(lambda leaf: leaf.detach().clone(), found))
            return found

        return call

    def clear(self) -> None:
        for kept in (self.works, self.losses, self.cohorts):
            kept.clear()

    @staticmethod
    def by_client(kept: list[Any], clients: list[str]) -> dict[str, list[Any]]:
        """Split mapped rows, or the calls of one client after another."""
        each = len(kept) // len(clients)
        if kept and leaves(kept[0])[-1].ndim:
            return {client: [row(value, i) for value in kept] for i, client in enumerate(clients)}
        return {c: kept[i * each : (i + 1) * each] for i, c in enumerate(clients)}


def server_values(
    algorithm: Algorithm, weight: Tensor, state: Any, memories: Any, cohort: Cohort
) -> dict[str, Any]:
    """Return server state and client memories by the names of the published equations."""
    kind = type(chain(algorithm.server)[-1]).__name__
    if algorithm.name.startswith("scaffold"):
        return {"c": state, "c_i": memories}
    if algorithm.name == "feddyn":
        return {"h": 0.1 * state, "h_k": memories}
    if algorithm.name == "mimelite":
        return {"m": state}
    if algorithm.name == "adabest":
        estimates = {client: memory.estimate for client, memory in memories.items()}
        return {"w_bar": state, "h_server": state["weight"] - weight, "h_i": estimates}
    if algorithm.name.startswith(("mfl", "fedlion")):
        return {"momentum": state}
    # Published forms keep the moments of the update, the library those of its negative.
    if kind == "Momentum":
        return {"v": -state}
    if kind == "Adagrad":
        return {"v": state}
    if kind == "ReddiAdagrad":  # without beta1 the first moment is the update
        return {"m": -cohort.delta, "v": state.second}
    if hasattr(state, "first"):
        return {"m": -state.first if kind.startswith("Reddi") else state.first, "v": state.second}
    return {}


def client_values(recorder: Recorder, clients: list[str]) -> dict[str, Any]:
    """Return what each client did in a round."""
    works = recorder.by_client(recorder.works, clients)
    last = {client: own[-1] for client, own in works.items()}
    found: dict[str, Any] = {
        "local_iterates": {c: [w.params["weight"][0] for w in own] for c, own in works.items()}
    }
    if hasattr(last[clients[0]].scratch, "ticks"):
        found["integer_update"] = {c: w.scratch.ticks for c, w in last.items()}
    if hasattr(last[clients[0]].scratch, "bad"):
        losses = recorder.by_client(recorder.losses, clients)
        found["clients"] = {
            c: {
                "epochs_run": last[c].steps,
                "losses": [full_pass.loss for full_pass in losses[c][1:]],
                "lr_used": [w.scratch.lr for w in own],
                "w": last[c].params,
            }
            for c, own in works.items()
        }
    return found


def compare(found: Any, expected: Any, atol: float) -> None:
    """Compare everything that a golden file has."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            compare(found[key], value, atol)
    elif isinstance(expected, list) and isinstance(expected[0], str):
        assert sorted(found) == sorted(expected)
    else:
        got = found["weight"] if isinstance(found, Tree) else found
        close(torch.stack(got) if isinstance(got, list) else got, expected, atol)


@PATHS
@pytest.mark.parametrize(("problem", "algorithm", "stored"), TRACES)
def test_federation_after_every_round(
    problem: Any,
    algorithm: Algorithm,
    stored: Any,
    engine: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    participants = [r.get("participants", list(problem["n"])) for r in stored]
    # Local epochs of one full batch; FedAdap may stop earlier.
    epochs = 6 if algorithm.name == "fedadap" else problem["local_steps"]
    task = quadratic_task(problem, epochs=epochs)
    sim = simulation(task, algorithm, engine=engine, dtype=dtype, participants=participants)
    recorder = Recorder(monkeypatch)
    for expected in stored:
        recorder.clear()
        before = row(sim.snapshot.state, 0)
        [record] = sim.run_round().records
        weight, state = sim.snapshot.params["weight"][0], row(sim.snapshot.state, 0)
        assert weight.dtype == dtype
        names = list(problem["n"])
        clients = [names[batch.client] for batch in sim.planner.batches(sim.round)]
        memories = {name: row(sim.memory.read([(0, i)]), 0) for i, name in enumerate(names)}
        cohort = row(recorder.cohorts[-1], 0)
        found = {
            "round": record.round,
            "participants": clients,
            "w": weight,
            "sum_w": weight.sum(),
            "delta": -cohort.delta,
            **client_values(recorder, clients),
            **server_values(algorithm, weight, state, memories, cohort),
        }
        if algorithm.name.startswith("fedgbo"):
            frozen = algorithm.server.share(before)
            found["recovered_mean_gradient"] = frozen.gradient(cohort.delta / cohort.average)
        models = {"w", "sum_w", "delta", "local_iterates"}
        compare(found, {k: v for k, v in expected.items() if k in models}, TOLERANCE[dtype])
        # Undoing a step divides rounding errors by lr (1 - beta1).
        compare(found, expected, 1e-9 if dtype == torch.float64 else 1e-4)
        if "clients" in expected:
            assert record.steps == sum(c["epochs_run"] for c in expected["clients"].values())


@PATHS
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
