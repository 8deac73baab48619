"""Clients' own models: equal in every engine, defined for newcomers, sampled and safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Task, Trial
from fedzmg.simulation import ClientMetrics, Simulation
from fedzmg.simulation import history as results
from golden_problems import random_task

COUNTS = [4, 9, 1, 6, 3, 8, 5]
PERSONAL = ["fedper", "fedrep", "ditto", "apfl", "pfedme", "fedala"]


def task(**protocol: Any) -> Task:
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    settings = {"cohort": 3, "batch_size": 4, "rounds": 2, "fine_tune": 2} | protocol
    return random_task(net, COUNTS, inputs=5, classes=3, **settings)


def evaluated(task: Task, *trials: Trial, engine: Any = "vectorized") -> list[ClientMetrics]:
    simulation = Simulation(
        task, list(trials), rounds=task.protocol.rounds, device=torch.device("cpu"),
        dtype=torch.float64, engine=engine,
    )  # fmt: skip
    while simulation.round < simulation.rounds:
        simulation.run_round()
    return simulation.evaluate_clients()


@pytest.mark.parametrize("name", [*PERSONAL, "fedavg"])
def test_engines_agree_and_newcomers_start_at_the_common_model(name: str) -> None:
    """One client is drawn; to all others the personal model is the common one."""
    one = task(cohort=1, rounds=1)
    [mapped], [looped] = (
        evaluated(one, Trial.of(name, seed=1), engine=engine)
        for engine in ("vectorized", "sequential")
    )
    assert mapped.tuned is not None
    assert (mapped.personal is None) == (name == "fedavg")
    for kind in ("metric", "tuned", *(["personal"] if name in PERSONAL else [])):
        assert np.array_equal(getattr(mapped, kind), getattr(looped, kind)), kind
    if mapped.personal is not None:
        assert (mapped.personal != mapped.metric).sum() <= 1


def test_diverged_trial_leaves_the_others_as_they_are() -> None:
    good = Trial.of("fedper", seed=1)
    [alone] = evaluated(task(), good)
    beside, lost = evaluated(task(), good, Trial.of("fedper", seed=1, client_lr=1e200))
    for kind in ("personal", "tuned"):
        assert np.array_equal(getattr(beside, kind), getattr(alone, kind))
        assert getattr(lost, kind).shape == (len(COUNTS),)


def test_large_populations_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    [everyone] = evaluated(task(), Trial.of("ditto"))
    monkeypatch.setattr(results, "MOST_CLIENTS", 3)
    [few] = evaluated(task(), Trial.of("ditto"))
    assert len(few.clients) == 3
    for kind in ("personal", "tuned"):
        assert np.array_equal(getattr(few, kind), getattr(everyone, kind)[few.clients])
