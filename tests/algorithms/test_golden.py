"""Known answers, worked out apart from the library, for every algorithm and both engines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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

import fedzmg
from fedzmg import algorithms
from fedzmg.algorithms import SGD, ZeroMean, zero_mean
from fedzmg.contract import (
    Algorithm,
    ClientContext,
    ClientRule,
    Cohort,
    Layout,
    Number,
    ServerRule,
    number,
)
from fedzmg.tree import Tree
from golden_problems import (
    DENSE,
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


@dataclass(frozen=True)
class ZeroMeanStep(ServerRule):
    """A rule that a user could write: the step of another server, made zero-mean per column."""

    inner: ServerRule
    axes: Any = None

    def for_layout(self, layout: Layout) -> ZeroMeanStep:
        return dataclasses.replace(self, axes={name: i.input_axes for name, i in layout.items()})

    def init(self, params: Tree) -> Any:
        return self.inner.init(params)

    def update(self, params: Tree, state: Any, cohort: Cohort) -> tuple[Tree, Any]:
        after, state = self.inner.update(params, state, cohort)
        step = {name: zero_mean(leaf, self.axes[name]) for name, leaf in (after - params).items()}
        return params + Tree(step), state


@dataclass(frozen=True)
class DecayKernels(ClientRule):
    """A rule that a user could write: momentum, and decay that spares biases."""

    lr: Number = number(0.1, above=0, doc="")
    momentum: Number = number(0.9, low=0, doc="")
    decay: Number = number(5e-4, low=0, doc="")
    kernels: frozenset[str] = frozenset()

    def for_layout(self, layout: Layout) -> DecayKernels:
        kernels = frozenset(name for name, info in layout.items() if info.role == "kernel")
        return dataclasses.replace(self, kernels=kernels)

    def begin(self, context: ClientContext, full_pass: Any) -> Tree:
        return context.params.zeros()

    def step(
        self, context: ClientContext, params: Tree, scratch: Tree, grad: Tree
    ) -> tuple[Tree, Tree]:
        scratch = self.momentum * scratch + grad
        kept = 1 - self.decay * self.lr
        shrunk = Tree({n: w * kept if n in self.kernels else w for n, w in params.items()})
        return shrunk - self.lr * scratch, scratch


P3_ENTRIES: dict[str, Algorithm] = {
    "fedavg": named("fedavg"),
    "fedavg_momentum_wd": named("fedavg", **PAPER),
    "fedzmg_lambda0": named("fedzmg", **PLAIN),
    "fedzmg_lambda_0.01": named("fedzmg", client_momentum=None, client_decay=0.01),
    "fedzmg_momentum": named("fedzmg", client_momentum=0.9, client_decay=None),
    "fedzmg_paper_settings": named("fedzmg", **PAPER),
    "fedzmg_server_lr_0.5": named("fedzmg", **PAPER, server_lr=0.5),
    "fedzmg_adam_tff": named("fedzmg-adam", client_momentum=0.9, client_decay=None, **ADAM),
    "fedzmg_adam_tff_projected_server": Algorithm(
        "projected", ZeroMean(SGD(0.1, 0.9)), ZeroMeanStep(algorithms.get("fedadam").server)
    ),
    "fedzmg_adam_reddi": zero_mean_clients_with_reddi(client_momentum=0.9, client_decay=None),
}
DENSE_ENTRIES: dict[str, Algorithm] = {
    "fedavg": named("fedavg"),
    "fedzmg_lambda0": named("fedzmg", **PLAIN),
    "fedzmg_paper_settings": named("fedzmg", **PAPER),
    "fedzmg_paper_settings_no_bias_decay": Algorithm(
        "spared", ZeroMean(DecayKernels()), algorithms.get("fedzmg").server
    ),
    "fedavg_momentum_wd": named("fedavg", **PAPER),
}
TRACES = [
    *((P2, name, algorithm, GOLDEN["algorithms"][name]) for name, algorithm in P2_ENTRIES.items()),
    *(
        (P3, f"p3-{name}", algorithm, GOLDEN["p3"]["algorithms"][name])
        for name, algorithm in P3_ENTRIES.items()
    ),
]
QUADRATICS = [pytest.param(Trace(p, a, entry["rounds"]), id=name) for p, name, a, entry in TRACES]


def test_every_stored_trace_is_used() -> None:
    stored = {name for name, entry in GOLDEN["algorithms"].items() if "rounds" in entry}
    assert stored == set(P2_ENTRIES)
    assert set(GOLDEN["p3"]["algorithms"]) == set(P3_ENTRIES)
    assert set(GOLDEN["dense_layer"]) - {"problem"} == set(DENSE_ENTRIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trace", QUADRATICS)
def test_model_after_every_round(trace: Trace, engine: str, dtype: torch.dtype) -> None:
    check_models(trace, engine, dtype)


@pytest.mark.parametrize("trace", QUADRATICS)
def test_local_iterates(trace: Trace) -> None:
    check_local_iterates(trace)


@pytest.mark.parametrize("trace", QUADRATICS)
def test_server_alone(trace: Trace) -> None:
    """The server rule on the stored deltas: model and, where stored, both moments."""
    problem, algorithm, rounds = trace
    rule = algorithm.for_layout(quadratic_task(problem).model.layout).server
    params = Tree({"weight": torch.tensor([problem["w0"]], dtype=torch.float64)})
    state = rule.init(params)
    for expected in rounds:
        delta = -torch.tensor([expected["delta"]], dtype=torch.float64)
        params, state = rule.update(params, state, cohort(delta, expected["round"], "weight"))
        close(params["weight"], expected["w"])
        if "m" in expected:
            # The file's published form keeps the moment of the update, the library's of minus it.
            sign = 1.0 if algorithm.name in ("fedadam", "fedzmg-adam") else -1.0
            close(sign * state.first["weight"], expected["m"])
            close(state.second["weight"], expected["v"])
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


def test_dense_layer_is_weighted_by_examples() -> None:
    assert DENSE["weights"] == "2/5 and 3/5"
    assert dense_task().train.counts.tolist() == [2, 3]


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


@pytest.mark.parametrize("engine", ENGINES)
def test_seed_and_client_order_do_not_matter_with_full_batches(engine: str) -> None:
    """Every client sees all of its data at every step, so only the cohort's order can differ."""
    found = [
        models(quadratic_task(P3), P3_ENTRIES["fedzmg_paper_settings"], engine=engine, seed=seed)
        for seed in range(4)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other[-1]["weight"], found[0][-1]["weight"], rtol=0, atol=1e-12)


def test_evaluation_reports_the_golden_loss() -> None:
    """The loss of the pooled examples is the weighted objective, here at a known model."""
    task = quadratic_task(P3)
    [history] = fedzmg.simulate(
        task,
        [fedzmg.Trial(P3_ENTRIES["fedavg"])],
        rounds=1,
        engine="sequential",
        device="cpu",
        dtype=torch.float64,
    )
    w = GOLDEN["p3"]["algorithms"]["fedavg"]["rounds"][0]["w"]
    expected = sum(
        share
        * 0.5
        * sum(h * (v - c) ** 2 for h, v, c in zip(P3["H"][k], w, P3["c"][k], strict=True))
        for k, share in {"A": 0.25, "B": 0.75}.items()
    )
    assert history.records[0].loss == pytest.approx(expected, abs=1e-6)
    assert history.metrics == pytest.approx([expected], abs=1e-6)
