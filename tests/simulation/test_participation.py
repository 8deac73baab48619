"""Rounds with cohorts of varying size and clients of unequal work."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedzmg import Federation, Participation, Task, Trial, simulate
from fedzmg.algorithms import ALGORITHMS
from fedzmg.simulation import EnginePlanner, RoundPlanner, Simulation
from fedzmg.tree import leaves, num_bytes
from golden_problems import random_task

SIZES = [3, 5, 1, 8, 6, 4, 2, 9]
ROUNDS = 6
NAMES = ["fedavg", "scaffold", "mimelite", "fedadap", "fedlion"]
"""Plain; client memory and totals; full passes; ends of epochs; integer uploads."""


@cache
def task(**protocol: Any) -> Task:
    settings = {"batch_size": 4, "epochs": 2, "cohort": 2, "rounds": ROUNDS, **protocol}
    return random_task(nn.Linear(6, 4), SIZES, inputs=6, classes=4, seed=5, shift=0.5, **settings)


def by_round(round_: int, key: int, population: int, examples: Any) -> list[int]:
    return list(range(key % 3, population, 3))


CHOICES = {
    "poisson": Participation(sampler="poisson", steps=(1, 5)),
    "examples": Participation(sampler="examples", epochs=(0.2, 2.5)),
    "schedule": Participation(
        sampler="schedule", schedule=[[0, 3], [], [5, 1, 7, 2], ["6"]], epochs=lambda c, *_: 1 + c
    ),
    "function": Participation(sampler=by_round, steps=lambda client, *_: 1 + 2 * client),
}
OTHERS = [choice for choice in CHOICES if choice != "poisson"]


def trials(name: str) -> list[Trial]:
    algorithm = ALGORITHMS[name].algorithm
    rates = [{"client.lr": rate} for rate in (0.02, 0.04)]
    # Their Poisson cohorts are both empty in rounds 1 and 2, the second alone is in round 6.
    return [Trial(algorithm.with_options(o), s) for o, s in zip(rates, (2, 13), strict=True)]


def simulation(name: str, choice: str, engine: Any = "vectorized", **more: Any) -> Simulation:
    arguments: dict[str, Any] = {"chosen": trials(name), "guard": False, **more}
    chosen, guard = arguments.pop("chosen"), arguments.pop("guard")
    return Simulation(
        task(), chosen, rounds=ROUNDS, device=torch.device("cpu"), dtype=torch.float64,
        engine=engine, federation=Federation(guard, CHOICES[choice]), **arguments,
    )  # fmt: skip


def run(sim: Simulation) -> tuple[list[Any], list[Any]]:
    """Records of all rounds, and checkpoints after the third."""
    records, kept = [], []
    while sim.round < ROUNDS:
        records.append([r._replace(seconds=0) for r in sim.run_round().records])
        if sim.round == 3:
            kept = [sim.checkpoint(i) for i in range(len(sim.trials))]
    return records, kept


def same_bits(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def distance(a: object, b: object) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *((name, "poisson") for name in NAMES[:2]),
        *(pytest.param(name, "poisson", marks=pytest.mark.slow) for name in NAMES[2:]),
        *(("scaffold", choice) for choice in OTHERS),
    ],
)
def test_engines_packs_chunks_and_resumes_agree(name: str, choice: str) -> None:
    whole = simulation(name, choice)
    records, kept = run(whole)
    sizes = {r.clients for rs in records for r in rs}
    assert (len(sizes) > 1) == (choice != "examples")
    if choice in ("poisson", "schedule"):
        assert 0 in sizes
    for engine in ("sequential", "cuda_graph"):
        other = simulation(name, choice, engine)
        facts = [[(r.clients, r.steps, r.bytes_down) for r in rs] for rs in run(other)[0]]
        assert facts == [[(r.clients, r.steps, r.bytes_down) for r in rs] for rs in records]
        assert distance(other.snapshot.params, whole.snapshot.params) < 1e-9
    chunked = simulation(name, choice, EnginePlanner("vectorized", chunk=2), guard=True)
    run(chunked)
    assert same_bits(chunked.snapshot.params, whole.snapshot.params)
    resumed = simulation(name, choice, restored=kept)
    assert resumed.round == 3
    assert repr(run(resumed)[0]) == repr(records[3:])
    assert same_bits(resumed.snapshot, whole.snapshot)
    alone = simulation(name, choice, chosen=trials(name)[1:])
    assert repr([rs[0] for rs in run(alone)[0]]) == repr([rs[1] for rs in records])
    for a, b in zip(leaves(alone.snapshot), leaves(whole.snapshot), strict=True):
        assert torch.equal(a[0], b[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "cuda_graph"])
def test_empty_cohort_moves_nothing_and_sends_nothing(name: str, engine: str) -> None:
    sim = simulation(name, "schedule", engine)
    sim.run_round()
    before = sim.snapshot
    for record in sim.run_round().records:
        assert (record.clients, record.dropped, record.steps) == (0, 0, 0)
        assert record.bytes_down == record.bytes_up == record.scalar_bytes_down == 0
        assert np.isnan(record.train_loss)
        assert not record.diverged
        assert record.client_loss is None
    assert same_bits(sim.snapshot, before)
    assert sim.run_round().records[0].clients == 4


def test_first_round_may_be_empty() -> None:
    first = Participation(sampler="schedule", schedule=[[], [1, 2]])
    for engine in ("auto", "vectorized", "cuda_graph"):
        [history] = simulate(
            task(), trials("scaffold")[0], engine=engine, federation=Federation(participation=first)
        )
        assert [r.clients for r in history.records] == [0, 2] * 3
    never = Participation(sampler=lambda *_: [])
    stages = Federation(participation=never)
    [history] = simulate(task(), trials("scaffold")[0], engine="vectorized", federation=stages)
    assert history.records[-1].total_bytes_down == 0


def test_default_is_the_protocol_bit_for_bit() -> None:
    plain = simulate(task(), trials("fedavg"), engine="vectorized")
    same = [
        Federation(),
        Federation(participation=Participation(epochs=task().protocol.epochs)),
    ]
    for federation in same:
        found = simulate(task(), trials("fedavg"), engine="vectorized", federation=federation)
        for a, b in zip(plain, found, strict=True):
            assert same_bits(a.params, b.params)


def test_bytes_down_count_the_clients_of_a_round() -> None:
    model = num_bytes(task().model.params())
    chosen = Federation(participation=CHOICES["poisson"])
    for history in simulate(task(), trials("fedavg"), engine="sequential", federation=chosen):
        for record in history.records:
            assert record.bytes_down == model * record.clients
        assert history.records[-1].total_bytes_down >= sum(r.bytes_down for r in history.records)


def test_algorithms_of_one_seed_share_cohorts_and_work() -> None:
    chosen = Federation(participation=CHOICES["poisson"])
    found = {
        (history.trial.seed, tuple((r.clients, r.steps) for r in history.records))
        for name in ("fedavg", "scaffold", "fedlion")
        for history in simulate(task(), trials(name), engine="vectorized", federation=chosen)
    }
    assert len(found) == 2


def test_extra_epochs_are_planned() -> None:
    usual, more = RoundPlanner(task(), [0]), RoundPlanner(task(), [0], extra_epochs=1)
    for a, b in zip(usual.batches(1), more.batches(1), strict=True):
        assert len(b.stream) == len(a.stream) * 3 // 2
        assert (b.stream.indices[: len(a.stream)] == a.stream.indices).all()
    assert more.longest == usual.longest * 3 // 2
    fixed = Participation(steps=2)
    planned = RoundPlanner(task(), [0], fixed, 1).batches(1)
    assert [len(b.stream) for b in planned] == [2 + -(-b.examples // 4) for b in planned]


def test_clients_without_examples_take_no_step() -> None:
    data = task().train
    empty = replace(data, offsets=np.array([0, 3, 3, 9, 17, 23, 27, 29, 38]))
    everyone = replace(task(cohort=8), train=empty)
    chosen = Federation(participation=Participation(steps=2))
    for engine in ("sequential", "vectorized"):
        [history] = simulate(everyone, trials("fedavg")[0], engine=engine, federation=chosen)
        assert [(r.clients, r.steps) for r in history.records] == [(7, 14)] * ROUNDS
