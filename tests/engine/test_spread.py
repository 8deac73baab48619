"""Work spread over devices: every client once, in fair shares, to the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedzmg import Trial, simulate, tasks
from fedzmg.engine.spread import Spread, deal
from fedzmg.simulation import Simulation

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
def test_shares_cover_everything_once_and_differ_little(sizes: list[int], shares: int) -> None:
    cuts = deal(sizes, shares)
    assert [i for cut in cuts for i in cut] == list(range(len(sizes)))
    assert len(cuts) == shares
    fair = sum(sizes) / shares
    for cut in cuts:
        assert sum(sizes[i] for i in cut) <= fair + max(sizes, default=0)


@pytest.mark.parametrize(
    ("name", "engine", "chunk"),
    [
        ("fedzmg", "vectorized", None),
        ("scaffold", "vectorized", None),
        ("fedlion", "vectorized", None),
        ("mimelite", "captured", 2),
        ("fedprox:adaptive", "captured", 3),
    ],
)
def test_two_devices_train_like_one(
    name: str, engine: Any, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.get("digits")
    trials = [Trial.of(name, seed, task) for seed in range(2)]
    [one, two] = simulate(task, trials, rounds=2, engine="vectorized", device="cpu")
    monkeypatch.setattr("fedzmg.simulation.devices.other_devices", lambda device: [CPU])
    simulation = Simulation(
        task, trials, rounds=2, device=CPU, dtype=torch.float32, engine=engine, chunk=chunk
    )
    assert isinstance(simulation._engine, Spread)
    reports = [simulation.run_round() for _ in range(2)]
    for i, history in enumerate((one, two)):
        assert [r.records[i].steps for r in reports] == [r.steps for r in history.records]
    for history, i in ((one, 0), (two, 1)):
        for leaf, name_ in ((history.params[n], n) for n in history.params):
            assert torch.equal(leaf, simulation.snapshot.params[name_][i])
