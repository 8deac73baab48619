"""Evaluation of stacked models: mapped and one after another."""

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, evaluation
from fedzmg.tree import row, stack

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 1, 6, 6)), RNG.integers(0, 3, 60)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("metric", ["accuracy", "auc"])
def test_mapped_models_score_as_one_after_another(
    number: int, metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    y = Y.clip(max=1)
    task = Task.from_arrays(model, X, y, Y, test=(X, y), metric=metric, cohort=1)
    params = stack([task.model.params().map(lambda leaf, i=i: leaf + 0.1 * i) for i in range(3)])
    scores = {}
    for size in (0, 1 << 40):
        monkeypatch.setattr(evaluation, "LOOP_SIZE", size)
        args = task.test, task.objective, task.metric, task.prepare
        scores[size] = evaluation.evaluate(row(params, slice(number)), *args, chunk=25)
        several = evaluation.evaluate(params, *args, chunk=25)
        assert torch.equal(scores[size], several[:number])
    torch.testing.assert_close(*scores.values(), rtol=1e-6, atol=1e-6)
