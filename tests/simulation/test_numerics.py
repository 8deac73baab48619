"""Every number that a simulation reports comes from the same kernels, asked for or recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedzmg import ACCURACY, Metric, Task, Trial, tasks
from fedzmg.engine.choose import EngineChoice
from fedzmg.simulation import Simulation


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
