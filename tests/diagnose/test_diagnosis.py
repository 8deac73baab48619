"""Diagnoses of whole tasks: a linear model by hand, engines, sampling and what can go wrong."""

from __future__ import annotations

import itertools
import json
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import tasks
from fedzmg.algorithms import get as algorithm
from fedzmg.data.federated import FederatedData
from fedzmg.data.plan import local_stream
from fedzmg.diagnose import Measurement, diagnose
from fedzmg.diagnose.measure import WHOLE
from fedzmg.errors import InputError
from fedzmg.models.initial import initial_params
from fedzmg.models.networks import CharGRU, mlp
from fedzmg.simulation import Trial, simulate
from fedzmg.tasks import Task
from golden_problems import Net

DOUBLE: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


def linear_task(shift: float = 1.0, clients: int = 5, model: nn.Module | None = None) -> Task:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(90, 6)) + shift).astype(np.float32)
    y, owner = rng.integers(0, 3, 90), np.sort(rng.integers(0, clients, 90))
    return Task.from_arrays(
        model or nn.Linear(6, 3), x, y, owner, test=(x, y), cohort=2, batch_size=8, epochs=2
    )


def softmax_gradient(w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray) -> Any:
    scores = x @ w.T + b
    p = np.exp(scores - scores.max(1, keepdims=True))
    delta = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
    return delta.T @ x, delta.sum(0)


def test_a_linear_model_by_hand() -> None:
    task = linear_task()
    found = diagnose(task, **DOUBLE)
    start = initial_params(task.model, task.init, 0)
    w, b = (start[name].double().numpy() for name in ("weight", "bias"))
    x, y = (column.numpy() for column in task.train.examples)
    x, ends = x.astype(np.float64), task.train.offsets
    own = [softmax_gradient(w, b, x[i:j], y[i:j]) for i, j in itertools.pairwise(ends)]
    layer = found.points[0].layers[0]
    shares = [6 * (g.mean(1) ** 2).sum() / (g**2).sum() for g, _ in own]
    assert np.allclose(layer.shares, shares, rtol=1e-9)
    loss, _ = softmax_gradient(w, b, x, y)  # weighted by examples, it is that of all examples
    assert layer.forbidden == pytest.approx(6 * (loss.mean(1) ** 2).sum() / (loss**2).sum())
    # A projected gradient is that of centred inputs, so nothing is left once they are.
    assert found.centred is not None
    assert found.centred.layers[0].share.high == pytest.approx(0, abs=1e-12)
    # Local training, with and without projection, step by step.
    models = {False: [], True: []}  # type: ignore[var-annotated]
    for project, moved in models.items():
        for k, (i, j) in enumerate(itertools.pairwise(ends)):
            v, c = w.copy(), b.copy()
            steps = local_stream(task.protocol.batching, 0, 1, k, 0, int(i), int(j - i))
            for batch, real in zip(steps.indices, steps.counts, strict=True):
                g, h = softmax_gradient(v, c, x[batch[:real]], y[batch[:real]])
                v, c = v - 0.05 * (g - project * g.mean(1, keepdims=True)), c - 0.05 * h
            moved.append(v)
    p = task.train.counts / 90
    for project, value in zip(models, astuple(found.points[0].drift["weight"]), strict=True):
        mean = np.tensordot(p, models[project], 1)
        spread = sum(q * ((m - mean) ** 2).sum() for q, m in zip(p, models[project], strict=True))
        assert value == pytest.approx(spread, rel=1e-9)


def same_point(one: Measurement, two: Measurement) -> None:
    for a, b in zip(one.layers, two.layers, strict=True):
        assert a.shares == pytest.approx(b.shares, rel=1e-9)
        assert astuple(a.distance) == pytest.approx(astuple(b.distance), rel=1e-9)
    assert astuple(one.drift[WHOLE]) == pytest.approx(astuple(two.drift[WHOLE]), rel=1e-9)


def test_clients_side_by_side_or_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    task = linear_task(clients=7, model=mlp(6, 4, outputs=3))
    together = diagnose(task, **DOUBLE)
    monkeypatch.setattr("fedzmg.diagnose.diagnosis.MOST_CLIENTS", 3)
    monkeypatch.setattr("fedzmg.diagnose.diagnosis.PASS_SIZE", 4)
    apart = diagnose(task, **DOUBLE)
    same_point(together.points[0], apart.points[0])


def test_a_model_that_does_not_map_is_measured_client_by_client() -> None:
    forwards: list[Any] = [
        lambda m, x: m.dense(x),
        # Decides by the value of a tensor, so it cannot be mapped over clients.
        lambda m, x: m.dense(x) if float(x.detach().sum()) < 1e9 else -m.dense(x),
    ]
    models = [Net(forward, dense=nn.Linear(6, 3)) for forward in forwards]
    same_point(*(diagnose(linear_task(model=model), **DOUBLE).points[0] for model in models))


def test_text_has_no_inputs_to_centre() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 9, (24, 5))
    task = Task.from_arrays(
        CharGRU(9, 4, 6), x, x, np.repeat(np.arange(4), 6), test=(x, x), cohort=2, batch_size=4
    )
    found = diagnose(task, device="cpu")
    assert found.centred is None
    names = [layer.name for layer in found.points[0].layers]
    assert names[0] == "embedding.weight"
    assert {"gru.weight_ih_l0", "gru.weight_hh_l0", "dense.weight"} <= set(names)
    lost = {one.name: one.lost for one in found.points[0].layers}
    assert lost["embedding.weight"] == 0
    assert all(value is not None and 0 <= value <= 1 for value in lost.values())
    json.dumps(found.as_dict(), allow_nan=False)


def test_along_a_run_measures_the_models_of_plain_fedavg() -> None:
    task = linear_task()
    found = diagnose(task, along=4, every=3, drifting=0, lr=0.1, **DOUBLE)
    assert [point.round for point in found.points] == [0, 3, 4]
    [history] = simulate(
        task, Trial(algorithm("fedavg").with_options({"client.lr": 0.1})), rounds=4, device="cpu",
        dtype=torch.float64, engine="vectorized",
    )  # fmt: skip
    alone = diagnose(task, params=history.params, round=4, drifting=0, lr=0.1, **DOUBLE)
    end = found.points[-1].whole
    assert alone.points[0].whole.shares == pytest.approx(end.shares)
    assert alone.centred is None
    assert alone.points[0].round == 4


def test_local_training_that_diverges_leaves_drift_out() -> None:
    task = replace(tasks.get("quadratic"), options={})
    assert diagnose(task, lr=1e30, device="cpu").points[0].drift == {}
    assert diagnose(task, drifting=0, device="cpu").points[0].drift == {}


def weights(**changes: Any) -> dict[str, Any]:
    return {"params": {**nn.Linear(6, 3).state_dict(), **changes}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": nn.Linear(6, 3)}, "is a Linear: .*Task.from_arrays"),
        ({"clients": 0}, "clients = 0"),
        ({"examples": 1.5}, "examples = 1.5"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"every": 0}, "every = 0"),
        ({"every": 3}, "every = 3"),
        ({"device": "tpu"}, "tpu"),
        ({"params": nn.Linear(6, 3)}, "params is a Linear"),
        ({"along": 2, **weights()}, "along = 2"),
        (weights(wieght=torch.zeros(3)), "'wieght': did you mean 'weight'"),
        (weights(bias=None), r"'bias'\] is None"),
        (weights(bias=[0.0] * 3), r"'bias'\] is \[0.0"),
        (weights(bias=torch.zeros(4)), r"'bias'\] .* \(4,\): .* \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diagnose(**{"task": linear_task(), "device": "cpu", **wrong})


def test_the_parameters_of_a_module_are_a_model() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    module[1].requires_grad_(False)
    task = replace(linear_task(model=module), init="given")
    state = {name: 2 * leaf for name, leaf in module.state_dict().items()}  # frozen ones, too
    trainable = {name: leaf for name, leaf in state.items() if not name.startswith("1")}
    found = [
        diagnose(task, params=params, drifting=0, **DOUBLE).points[0]
        for params in (state, dict(reversed(state.items())), trainable)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0] != diagnose(task, drifting=0, **DOUBLE).points[0]


# Verdicts on problems whose answer is known.


@pytest.mark.parametrize(
    ("shift", "truth", "expect"),
    [(0.0, [1.0, -1.0], "little"), (4.0, [1.0, -1.0], "gain"), (0.0, [1.0, 1.0], "loss")],
)
def test_verdicts(shift: float, truth: list[float], expect: str) -> None:
    x = np.random.default_rng(2).normal(size=(800, 16))
    y = (x @ np.tile(truth, 8) > 0).astype(np.int64)
    x = (x + shift).astype(np.float32)
    task = Task.from_arrays(
        nn.Linear(16, 2), x, y, np.arange(800) % 8, test=(x, y), cohort=2, batch_size=10
    )
    found = diagnose(task, drifting=0, device="cpu")
    assert found.verdict.expect == expect
    assert found.verdict.evidence
    assert diagnose(task, trial=0, drifting=0, device="cpu").verdict.expect == "unclear"


@pytest.mark.gpu
def test_a_gpu_measures_the_same_as_a_cpu() -> None:
    task = linear_task(model=mlp(6, 4, outputs=3))
    same_point(*(diagnose(task, **{**DOUBLE, "device": d}).points[0] for d in ("cpu", "cuda")))


def test_sampling_is_seeded_and_leaves_out_clients_without_examples() -> None:
    task = linear_task(clients=6)
    data = task.train
    empty = FederatedData(
        data.examples, np.insert(data.offsets, 2, data.offsets[2]), ("a", "none", *data.names[1:])
    )
    holed = replace(task, train=empty)
    assert empty.counts.min() == 0
    found = diagnose(holed, drifting=0, device="cpu")
    assert len(found.clients) == 6
    few = [diagnose(holed, clients=3, drifting=0, seed=s, device="cpu").clients for s in (0, 0, 5)]
    assert few[0] == few[1] != few[2]
    assert len(few[0]) == 3


def test_a_model_that_is_not_projected() -> None:
    scaled = Net(lambda m, x: x @ m.scale, scale=nn.Parameter(torch.ones(6, 3)))
    x = np.ones((4, 6), np.float32)
    task = Task.from_arrays(
        scaled, x, [0, 1, 2, 0], [0, 0, 1, 1], test=(x, [0, 1, 2, 0]), cohort=1,
        init="given", axes={"scale": ()},
    )  # fmt: skip
    assert "nothing is projected" in diagnose(task, device="cpu").verdict.summary
