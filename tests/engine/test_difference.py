"""Merging whole models gives the bits of the obvious path."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial, simulate
from fedzmg.engine import sequential
from fedzmg.engine.aggregate import Merger


def task(*, batch_norm: bool, broken: int | None = None) -> Task:
    """Build a task of four clients; gradients of one may be not finite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    owners = np.repeat(np.arange(4), [4, 8, 12, 16])
    if broken is not None:
        x[owners == broken] = 1e38
    norm = nn.BatchNorm1d(5) if batch_norm else nn.ReLU()
    model = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 3))
    test = rng.normal(size=(4, 6)).astype(np.float32), rng.integers(0, 3, 4)
    return Task.from_arrays(
        model, x, rng.integers(0, 3, 40), owners, test=test, cohort=3, batch_size=3, epochs=2
    )


def results(problem: Task, name: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train a few rounds; return the model and the records without their times."""
    [found] = simulate(problem, [Trial.of(name, 0)], rounds=3, engine="sequential")
    return dict(found.params), [record._replace(seconds=0.0) for record in found.records]


@pytest.mark.parametrize("collected", [True, False])
@pytest.mark.parametrize(("batch_norm", "broken"), [(False, None), (True, None), (False, 2)])
@pytest.mark.parametrize("name", ["fedavg", "fedavg:momentum", "fedzmg", "fedprox", "scaffold"])
def test_the_fast_path_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    batch_norm: bool,
    broken: int | None,
    collected: bool,
) -> None:
    problem = task(batch_norm=batch_norm, broken=broken)
    with monkeypatch.context() as patch:
        patch.setattr(Merger, "_add_models", lambda *_: False)
        model, records = results(problem, name)
    if not collected:
        monkeypatch.setattr(sequential, "CHUNK_BYTES", 0)
    fast_model, fast_records = results(problem, name)
    assert repr(fast_records) == repr(records)
    for key, leaf in model.items():
        assert torch.equal(fast_model[key], leaf)
