"""Training on tasks: empty clients, frozen and pretrained models, and the embedded presets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_task import make
from torch import nn

from fedzmg import Protocol, Task, Trial, simulate, tasks
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.data.plan import sample_cohort
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.initial import initial_params
from fedzmg.simulation import RoundReport
from fedzmg.tree import row


def sparse(counts: list[int], **protocol: Any) -> Task:
    """A task on which some clients have no example."""
    rows = sum(counts)
    rng = np.random.default_rng(1)
    data = examples(rng.normal(size=(rows, 4)), rng.integers(0, 3, rows))
    names = tuple(f"c{i}" for i in range(len(counts)))
    return Task(
        name="sparse",
        model=FunctionalModel(nn.Linear(4, 3)),
        train=FederatedData(data, np.cumsum([0, *counts]), names),
        test=data,
        protocol=Protocol(cohort=2, batch_size=4, eval_every=2).with_options(protocol),
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("name", "straddle"),
    [("fedzmg", True), ("fedzmg", False), ("fedadam", True), ("scaffold", False),
     ("scaffold:option-1", True), ("fedadap", False)],
)  # fmt: skip
def test_clients_without_examples_contribute_nothing(
    engine: Any, name: str, straddle: bool
) -> None:
    """A cohort of them leaves the model as it is, server momentum or not."""
    task = sparse([0, 9, 0, 0], epochs=2, straddle=straddle, rounds=8)
    cohorts = [set(sample_cohort(0, r, 4, 2, replacement=False).tolist()) for r in range(1, 9)]
    models = [initial_params(task.model, task.init, 0)]

    def keep(report: RoundReport) -> None:
        models.append(row(report.simulation.snapshot.params, 0))
        [record] = report.records
        assert record.clients == int(1 in cohorts[report.round - 1])
        assert (record.dropped, record.diverged) == (0, False)

    simulate(task, [Trial.of(name)], engine=engine, device="cpu", observer=keep)
    moved = [
        any(not torch.equal(before[key], after[key]) for key in before)
        for before, after in itertools.pairwise(models)
    ]
    assert moved == [1 in cohort for cohort in cohorts]
    assert {True, False} == set(moved)


def test_frozen_parameters_stay_and_do_not_travel() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    task = make(model=net, init="given", rounds=2)
    [history] = simulate(task, [Trial.of("fedzmg")])
    assert set(history.params) == {"2.weight", "2.bias"}
    assert history.records[0].bytes_up == 2 * 4 * (6 * 3 + 3)
    trained = history.model()
    assert torch.equal(trained[0].weight, net[0].weight)  # type: ignore[index]
    assert not torch.equal(trained[2].weight, net[2].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "rounds", "level"),
    [
        ("digits", 8, 0.2),
        pytest.param("plays", 2, 0.13, marks=pytest.mark.slow),
    ],
)
def test_presets_learn_something_and_engines_agree(name: str, rounds: int, level: float) -> None:
    task = tasks.get(name)
    small = task.protocol.with_options({"cohort": 5, "eval_every": rounds})
    test = Examples(task.test.x[::4], task.test.y[::4])
    task = replace(task, protocol=small, test=test)
    ends: list[Any] = []
    for engine in ("sequential", "vectorized"):
        models: list[Any] = []

        def keep(report: RoundReport, into: list[Any] = models) -> None:
            into.append(row(report.simulation.snapshot.params, 0))

        length = rounds if engine == "vectorized" else 1
        [history] = simulate(
            task,
            [Trial.of("fedzmg", task=task)],
            rounds=length,
            engine=engine,
            observer=keep,  # type: ignore[arg-type]
        )
        ends.append(models[0])
    losses = [r.loss for r in history.records if r.loss is not None]
    assert losses[-1] < losses[0]
    assert history.metrics[-1] > level
    for key, leaf in ends[0].items():
        torch.testing.assert_close(leaf, ends[1][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_loss_of_any_type_gives_the_step_computed_by_hand(kind: torch.dtype, engine: Any) -> None:
    x, y = np.array([[1.0], [2.0]], np.float32), np.zeros((2, 1), np.float32)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    task = Task.from_arrays(
        model, x, y, [0, 0], test=(x, y), cohort=1, batch_size=2, init="given",
        loss=lambda outputs, targets: ((outputs - targets) ** 2).to(kind).mean(1),
    )  # fmt: skip
    [history] = simulate(task, [Trial.of("fedavg", 0, client_lr=0.1)], rounds=1, engine=engine)
    # Losses 1 and 4 have mean 2.5, the mean of 2 w x^2 is 5, and 1 - 0.1 * 5 = 0.5.
    assert history.params["weight"].item() == pytest.approx(0.5)
    assert history.records[0].train_loss == pytest.approx(2.5)
