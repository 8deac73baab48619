"""The training dtype decides the precision of data, computation and model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import Metric, Task, Trial, simulate


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    assert outputs.dtype == targets.dtype
    return (outputs.squeeze(-1) - targets) ** 2


def task(dtype: Any) -> Task:
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
        task(np.float64), Trial.of("fedavg"), rounds=2, dtype=torch.float64, engine=engine
    )
    model = history.model()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    # Data rounded to single precision would leave an error of about (1e-7)^2.
    assert history.metrics[-1] < 1e-28
    x, y = history.task.test
    assert float(squared(model(x), y).detach().mean()) < 1e-28


def test_single_precision_training_is_the_same_for_data_in_either_precision() -> None:
    trial = Trial.of("fedavg", client_lr=0.1)
    single, double = task(np.float32), task(np.float64)
    rounded = Task.from_arrays(
        single.model.source, *(c.float() for c in double.train.examples),
        np.repeat(np.arange(3), 4), test=tuple(c.float() for c in double.test), loss=squared,
        metric=single.metric, init="given", cohort=3, batch_size=4,
    )  # fmt: skip
    one, other = (simulate(t, trial, rounds=3, engine="vectorized")[0] for t in (double, rounded))
    assert all(torch.equal(one.params[n], other.params[n]) for n in one.params)
    assert {p.dtype for p in one.model().parameters()} == {torch.float32}
    assert one.client_metrics().loss.tolist() == other.client_metrics().loss.tolist()
