"""Cohorts in shards: one shard is the whole cohort, and a resumed run has the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import InputError, Task
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.federation import Federation
from fedzmg.participation import Participation
from fedzmg.simulation import RoundReport, Simulation, Trial
from fedzmg.simulation.shards import LocalShards, Shards, shard_borders

ALGORITHMS = ("fedavg", "scaffold", "fednova")


def toy() -> Task:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), [4, 9, 6, 3, 8, 5])
    x, y = rng.normal(size=(len(owner), 5)), rng.integers(0, 3, len(owner))
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return Task.from_arrays(
        model, x, y, owner, test=(x, y), name="toy", cohort=4, batch_size=5, epochs=1
    )


def trained(name: str, shards: Shards | None, **more: Any) -> Simulation:
    simulation = Simulation(
        toy(), [Trial.of(name, seed=seed) for seed in (0, 1)], rounds=3,
        device=torch.device("cpu"), dtype=torch.float64, engine="vectorized", shards=shards, **more,
    )  # fmt: skip
    while simulation.round < 3:
        simulation.run_round()
    return simulation


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shards_have_the_sums_of_the_cohort(name: str) -> None:
    whole, one, four = (trained(name, s) for s in (None, LocalShards(1), LocalShards(4)))
    for leaf, path in ((leaf, path) for path, leaf in whole.snapshot.params.items()):
        assert torch.equal(leaf, one.snapshot.params[path])
        torch.testing.assert_close(leaf, four.snapshot.params[path], rtol=0, atol=1e-12)
    for trial in (0, 1):
        memories = [simulation.memory.of_trial(trial) for simulation in (whole, four)]
        assert memories[0].keys() == memories[1].keys()


def test_round_without_clients_in_shards() -> None:
    schedule = Participation(sampler="schedule", schedule=[[0, 1], [], [2, 5]])
    known = {"federation": Federation(participation=schedule)}
    whole, parts = (trained("scaffold", shards, **known) for shards in (None, LocalShards(2)))
    for path, leaf in whole.snapshot.params.items():
        torch.testing.assert_close(leaf, parts.snapshot.params[path], rtol=0, atol=1e-12)


def test_every_client_has_one_shard() -> None:
    for clients, shards in ((10, 3), (3, 10), (10**6, 64)):
        borders = shard_borders(clients, shards)
        assert (borders[0], borders[-1], len(borders)) == (0, clients, shards + 1)
        assert (borders[1:] >= borders[:-1]).all()


def test_stages_that_need_all_uploads_are_refused() -> None:
    with pytest.raises(InputError, match="guard"):
        trained("fedavg", LocalShards(2), federation=Federation(guard=True))


class Crash(Silent):
    def advance(self, report: RoundReport) -> None:
        if report.round == 3:
            raise MemoryError


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_resumed_run_in_shards_has_the_same_bits(name: str, tmp_path: Path) -> None:
    task = toy()
    spec = RunSpec(task="toy", algorithm=name, shards=3, protocol={"rounds": 5})
    [whole] = run_pack(task, [spec], [tmp_path / "whole"])
    with pytest.raises(MemoryError):
        run_pack(task, [spec], [tmp_path / "cut"], progress=Crash(), checkpoint_seconds=0)
    [resumed] = run_pack(task, [spec], [tmp_path / "cut"])
    without = [[r._replace(seconds=0) for r in h.records] for h in (whole, resumed)]
    assert without[0] == without[1]
    assert RunSpec.read(tmp_path / "cut" / "spec.toml").shards == 3
    stored = list((tmp_path / "cut").glob("shard-*/memory.rows"))
    assert len(stored) == (3 if name == "scaffold" else 0)
    for file in stored:  # a changed byte is noticed, and training starts again
        file.write_bytes(bytes(len(file.read_bytes())))
    if stored:
        with pytest.raises(InputError, match="damaged"):
            run_pack(task, [spec], [tmp_path / "cut"])
