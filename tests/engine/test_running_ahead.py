"""A GPU begins the next round before the last one is read; here a CPU does the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedzmg import Task, Trial
from fedzmg.simulation import Checkpoint, Record, Simulation
from fedzmg.simulation.records import Reading
from golden_problems import random_task

CPU = torch.device("cpu")


def task() -> Task:
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return random_task(
        net, [5, 12, 8, 3], inputs=6, classes=3, cohort=3, batch_size=4, epochs=2, eval_every=2
    )


def build(
    device: torch.device = CPU,
    *,
    name: str = "fedzmg-adam",
    engine: str = "cuda_graph",
    **kwargs: object,
) -> Simulation:
    trials = [Trial.of(name, seed) for seed in range(2)]
    return Simulation(
        task(), trials, rounds=6, device=device, dtype=torch.float32, engine=engine, **kwargs
    )  # type: ignore[arg-type]


def finish(simulation: Simulation) -> list[tuple[list[Record], Checkpoint]]:
    found = []
    while simulation.round < simulation.rounds:
        report = simulation.run_round()
        assert report.round == simulation.round
        records = [record._replace(seconds=0) for record in report.records]
        found.append((records, simulation.checkpoint(0)))
    return found


def assert_same(
    a: list[tuple[list[Record], Checkpoint]], b: list[tuple[list[Record], Checkpoint]]
) -> None:
    for (records, there), (expected, here) in zip(a, b, strict=True):
        assert records == expected
        assert there.round == here.round
        assert there.tensors.keys() == here.tensors.keys()
        for name, tensor in here.tensors.items():
            assert torch.equal(there.tensors[name], tensor), name


def ahead(simulation: Simulation) -> Simulation:
    simulation.runs_ahead = True
    return simulation


def test_running_ahead_moves_no_bit() -> None:
    assert_same(finish(ahead(build())), finish(build()))


def test_a_checkpoint_does_not_know_of_the_round_ahead() -> None:
    whole = finish(build())
    first = ahead(build())
    for _ in range(3):
        first.run_round()
    kept = [first.checkpoint(i) for i in range(2)]
    assert_same(finish(build(restored=kept)), whole[3:])


@pytest.mark.gpu
def test_client_memory_is_never_read_ahead() -> None:
    assert not build(torch.device("cuda"), name="scaffold").runs_ahead


@pytest.mark.gpu
def test_a_round_is_launched_without_waiting_for_the_gpu() -> None:
    simulation = build(torch.device("cuda"))
    assert simulation.runs_ahead
    for _ in range(3):
        simulation.run_round()
    assert simulation.planner.batches(5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        simulation.launch(5, simulation.snapshot)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_reading_does_not_wait_for_what_came_after() -> None:
    table = torch.arange(6.0, device="cuda").reshape(2, 3)
    reading = Reading(table)
    table.zero_()
    torch.cuda._sleep(2_000_000_000)  # about a second
    after = torch.cuda.Event()
    after.record()
    assert reading.rows() == [[0, 1, 2], [3, 4, 5]]
    assert not after.query()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda_graph", "compiled"])
def test_a_deterministic_pack_resumes_with_the_same_bits(engine: str) -> None:
    gpu = torch.device("cuda")
    whole = finish(build(gpu, engine=engine, deterministic=True))
    first = build(gpu, engine=engine, deterministic=True)
    for _ in range(3):
        first.run_round()
    kept = [first.checkpoint(i) for i in range(2)]
    assert_same(finish(build(gpu, engine=engine, deterministic=True, restored=kept)), whole[3:])
