"""The comparison with other systems: the plain loop, what is compared, what is printed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import WORKLOADS
from fedzmg.models.initial import initial_params
from fedzmg.simulation import Simulation, Trial
from fedzmg.tree import row

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ("peers", "plain_loop", "rivals")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other from their own folder; other tests do not see them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] in NAMES]:
        del sys.modules[name]


def facts(network: str = "mlp") -> Any:
    from peers.work import Facts

    return Facts(network, False, population=12, lr=0.05, device="cpu", precision="float32")


def test_the_plain_loop_is_the_sequential_engines_round() -> None:
    from peers.ours import define
    from plain_loop import plain_round

    task = WORKLOADS["mlp"](clients=12)
    work = define(facts(), rounds=1)
    model = copy.deepcopy(task.model.source).double()
    model.load_state_dict(dict(initial_params(task.model, task.init, 0).items()))
    x, y = torch.from_numpy(work.x).double(), torch.from_numpy(work.y)
    cohort = [[(x[rows], y[rows]) for rows in client] for client in work.batches[0]]
    assert plain_round(model, cohort, lr=0.05) == work.steps == 10 * 8

    task = replace(task, protocol=replace(task.protocol, eval_every=10**9))
    trial = Trial.of("fedavg", client_lr=0.05)
    ours = Simulation(
        task, [trial], rounds=2, device=torch.device("cpu"), dtype=torch.float64,
        engine="sequential",
    )  # fmt: skip
    ours.run_round()
    for name, value in row(ours.snapshot.params, 0).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("network", ["mlp", "cifar100", "pfl-cifar10"])
def test_peers_networks_are_the_workloads(network: str) -> None:
    from peers.networks import NETWORKS
    from peers.ours import TASKS

    ours = TASKS[network](clients=10)
    theirs = NETWORKS[network](True).eval()
    source = copy.deepcopy(ours.model.source).eval()
    theirs.load_state_dict(source.state_dict())
    x = ours.prepare(ours.train.examples[0][:2], torch.float32)
    torch.testing.assert_close(theirs(x), source(x))
    rates = [
        [m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)] for net in (theirs, source)
    ]
    assert rates[0] == rates[1]


def test_ratios_are_taken_turn_by_turn() -> None:
    """A turn during which the machine was ten times slower changes no ratio."""
    from peers.table import Outcome, times_slower

    slow = Outcome("slow", turns=[[40, 41, 39], [400, 410, 390], [40]])
    fast = Outcome("fast", turns=[[10, 10, 90], [100, 100, 100], [10]])
    assert times_slower(slow, fast) == 4
    assert slow.round_ms == 40


def test_missing_work_is_detected() -> None:
    from peers.table import distance, doubts

    start = {"w": np.zeros((2, 2), np.float32), "b": np.zeros(2, np.float32)}
    moved = {name: value + 1 for name, value in start.items()}

    def found(steps: list[int], last: dict[str, Any]) -> str:
        return "; ".join(doubts({"steps": steps}, last, start, steps=80, rounds=2))

    assert found([80, 80], moved) == ""
    assert "local steps" in found([80, 40], moved)
    assert "local steps" in found([80], moved)
    assert "has not moved" in found([80, 80], {**moved, "b": start["b"]})
    assert "not finite" in found([80, 80], {**moved, "b": start["b"] * np.nan})
    assert "6 parameters" not in found([80, 80], moved)
    assert "4 parameters" in found([80, 80], {"w": moved["w"]})
    assert distance(moved, moved, start) == 0
    twice = {name: 2 * value for name, value in moved.items()}
    assert distance(twice, moved, start) == pytest.approx(1)
