"""Precision, kernels and divergence: what a training computes with, and where it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import ACCURACY, InputError, Metric, Task, Trial, simulate, tasks
from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EngineChoice
from fedzmg.simulation import Simulation
from golden_problems import random_task


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.dtype == targets.dtype
    return (outputs.squeeze(-1) - targets) ** 2


def linear_task(dtype: Any) -> Task:
    """Exactly linear data and a model that begins at their solution."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3)).astype(dtype)
    y = x @ np.array([1.0, -2.0, 0.5], dtype=dtype)
    module = nn.Linear(3, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
        module.bias.zero_()
    return Task.from_arrays(
        module, x, y, np.arange(12) % 3, test=(x, y), loss=squared, init="given",
        metric=Metric("mse", squared, higher_is_better=False), cohort=3, batch_size=4,
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_double_precision_data_are_trained_on_in_double_precision(engine: Any) -> None:
    [history] = simulate(
        linear_task(np.float64), Trial.of("fedavg"), rounds=2, dtype=torch.float64, engine=engine
    )
    model = history.model()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    # Data rounded to single precision would leave an error of about (1e-7)^2.
    assert history.metrics[-1] < 1e-28
    x, y = history.task.test
    assert float(squared(model(x), y).detach().mean()) < 1e-28


def test_single_precision_training_is_the_same_for_data_in_either_precision() -> None:
    trial = Trial.of("fedavg", client_lr=0.1)
    single, double = linear_task(np.float32), linear_task(np.float64)
    rounded = Task.from_arrays(
        single.model.source, *(c.float() for c in double.train.examples),
        np.repeat(np.arange(3), 4), test=tuple(c.float() for c in double.test), loss=squared,
        metric=single.metric, init="given", cohort=3, batch_size=4,
    )  # fmt: skip
    one, other = (simulate(t, trial, rounds=3, engine="vectorized")[0] for t in (double, rounded))
    assert all(torch.equal(one.params[n], other.params[n]) for n in one.params)
    assert {p.dtype for p in one.model().parameters()} == {torch.float32}
    assert one.client_metrics().loss.tolist() == other.client_metrics().loss.tolist()


def build(task: Task, *, onednn: bool) -> Simulation:
    return Simulation(
        task, [Trial.of("fedzmg", 0)], rounds=1, device=torch.device("cpu"), dtype=torch.float32,
        engine=EngineChoice("vectorized", "asked for", onednn),
    )  # fmt: skip


@pytest.mark.parametrize("onednn", [True, False])
def test_a_record_is_what_evaluating_finds(onednn: bool) -> None:
    simulation = build(tasks.get("digits"), onednn=onednn)
    [record] = simulation.run_round().records
    # To the bit: a grid takes its last round from a record and those before from evaluations.
    assert [(record.loss, record.metric)] == simulation.evaluate()


@pytest.mark.parametrize("onednn", [True, False])
def test_all_evaluations_use_the_kernels_of_the_choice(onednn: bool) -> None:
    seen: list[bool] = []

    def watching(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return ACCURACY.function(outputs, targets)

    x, y = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    task = Task.from_arrays(
        torch.nn.Linear(3, 2), x, y, [0, 0, 0, 1, 1, 1], test=(x, y), cohort=2,
        metric=Metric("accuracy", watching),
    )  # fmt: skip
    simulation = build(task, onednn=onednn)
    before = torch.backends.mkldnn.enabled
    for look in (simulation.run_round, simulation.evaluate, simulation.evaluate_clients):
        seen.clear()
        look()
        assert set(seen) == {onednn}, look
        assert torch.backends.mkldnn.enabled == before


SIZES = [4, 4, 8]


def task(*, test: float = 1.0, poisoned: int | None = None) -> Task:
    """Three clients who all take part; test inputs are multiplied, one client's may be spoilt."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(3), SIZES)
    x, y = rng.normal(size=(16, 3)).astype(np.float32), rng.integers(0, 2, 16)
    whole = Task.from_arrays(
        nn.Linear(3, 2), x, y, owner, test=(x, y), cohort=3, batch_size=4, eval_every=2
    )
    if poisoned is not None:
        spoilt = torch.from_numpy(np.where((owner == poisoned)[:, None], np.nan, x))
        data = Examples(spoilt.to(torch.float32), whole.train.examples.y)
        whole = replace(whole, train=replace(whole.train, examples=data))
    return replace(whole, test=Examples(whole.test.x * test, whole.test.y))


@pytest.mark.parametrize("name", ["fedzmg", "fedadam", "scaffold"])
def test_a_loss_that_is_not_finite_freezes_the_model(name: str) -> None:
    """Also while clients still send what is fine: nothing comes back from the dead."""
    one, more = (
        simulate(task(test=np.nan), Trial.of(name), rounds=rounds, engine="vectorized")[0]
        for rounds in (1, 4)
    )
    assert one.diverged == more.diverged == 1
    assert [record.clients for record in more.records] == [3] * 4
    assert more.metrics == [0.0] * 3
    assert all(torch.equal(one.params[n], more.params[n]) for n in one.params)
    [alive] = simulate(task(), Trial.of(name), rounds=4, engine="vectorized")
    assert alive.diverged is None
    assert not all(torch.equal(one.params[n], alive.params[n]) for n in one.params)


def test_rounds_in_which_nobody_has_a_batch_are_no_divergence() -> None:
    """Nothing was sent, so nothing was lost; only three lost rounds in a row end a trial."""
    sizes = [9, *[2] * 20]
    protocol = {"batch_size": 9, "keep_partial": False, "cohort": 1}
    few = random_task(nn.Linear(3, 2), sizes, inputs=3, classes=2, **protocol)
    [history] = simulate(few, Trial.of("fedavg"), rounds=8, engine="vectorized")
    assert [(r.clients, r.dropped, r.steps) for r in history.records[:5]] == [(0, 0, 0)] * 5
    assert history.diverged is None
    with pytest.raises(InputError, match="none trains"):
        replace(few, protocol=few.protocol.with_options({"batch_size": 10}))
    everybody = replace(task(), train=replace(task().train, examples=_not_a_number(task())))
    [lost] = simulate(everybody, Trial.of("fedavg"), rounds=5, engine="vectorized")
    assert [(r.clients, r.dropped) for r in lost.records] == [(0, 3)] * 5
    assert lost.diverged == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_test_example_without_an_output_is_named(dtype: torch.dtype) -> None:
    class Ratio(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) / (x[:, :1] != 0))[:, 0]

    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    for spoilt, words in (([7], "test example 7 "), (range(12), "client.lr")):
        test = np.where(np.isin(np.arange(12), spoilt)[:, None], 0, x)
        few = Task.from_arrays(
            Ratio(3, 1), x, x[:, 0], np.arange(12) % 3, test=(test, x[:, 0]), cohort=3,
            loss="squared_error",
        )  # fmt: skip
        [history] = simulate(few, Trial.of("fedavg"), rounds=2, dtype=dtype)
        assert history.diverged == 1
        assert words in history.why_diverged()


def _not_a_number(whole: Task) -> Examples:
    x, y = whole.train.examples
    return Examples(x * np.nan, y)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_uploads_that_were_rejected_have_travelled(engine: str) -> None:
    [history] = simulate(task(poisoned=1), Trial.of("fedavg"), rounds=3, engine=engine)  # type: ignore[arg-type]
    model = 4 * (3 * 2 + 2)
    for rounds, record in enumerate(history.records, 1):
        assert (record.clients, record.dropped, record.steps) == (2, 1, 1 + 2)
        assert record.bytes_up == 3 * model
        assert record.total_bytes_up == rounds * 3 * (model + 8)
        assert record.total_bytes_down == rounds * 3 * model
