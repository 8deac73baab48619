"""Parts of the contract that few built-in algorithms use: memory, full passes, ends of epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedzmg import Algorithm, Task, Tree, Trial, simulate
from fedzmg.algorithms import Average
from fedzmg.contract import ClientRule, Number, number
from fedzmg.messages import ClientContext, FullPass, FullPassTiming, Upload
from fedzmg.simulation import Simulation
from fedzmg.tree import State
from golden_problems import random_task

SIZES = [5, 12, 8, 3]


def task(**protocol: Any) -> Task:
    settings = {"batch_size": 4, "epochs": 3, "cohort": 2, "rounds": 6, **protocol}
    return random_task(nn.Linear(3, 2), SIZES, inputs=3, classes=2, **settings)


@dataclass(frozen=True)
class Remembering(ClientRule):
    """Adds its own earlier updates to its gradient and counts its rounds."""

    lr: Number = number(0.1, above=0, doc="learning rate")

    def init_memory(self, params: Tree) -> State:
        return params.zeros(), next(iter(params.values())).new_zeros(())

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Any:
        past, _ = context.memory
        return params - self.lr * (grad + 0.1 * past), scratch

    def finish(self, context: ClientContext, params: Tree, scratch: State, steps: Tensor) -> Any:
        past, rounds = context.memory
        delta = context.params - params
        return Upload(delta), (past + delta, rounds + 1)


@dataclass(frozen=True)
class FullGradient(ClientRule):
    """One full-gradient step from the full_pass, and nothing else."""

    lr: Number = number(0.1, above=0, doc="learning rate")

    @property
    def full_pass(self) -> FullPassTiming:
        return "start"

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        assert isinstance(full_pass, FullPass)
        return full_pass.grad

    def step(self, context: ClientContext, params: Tree, scratch: State, grad: Tree) -> Any:
        return context.params - self.lr * scratch, scratch


def run(rule: ClientRule, engine: str, problem: Task | None = None) -> tuple[Simulation, list[Any]]:
    sim = Simulation(
        problem or task(),
        [Trial(Algorithm("test", rule, Average()), seed) for seed in (0, 1)],
        rounds=6,
        device=torch.device("cpu"),
        dtype=torch.float64,
        engine=engine,  # type: ignore[arg-type]
    )
    return sim, [sim.run_round().records for _ in range(6)]


def seen(sim: Simulation) -> dict[tuple[int, int], Any]:
    """Every memory, by trial and client."""
    return {(t, c): m for t in range(len(sim.trials)) for c, m in sim.memory.of_trial(t).items()}


def test_memory_of_a_dropped_upload_is_not_written() -> None:
    base = task(cohort=4)
    x = base.train.examples.x.clone()
    x[:5] = float("nan")
    bad = replace(base, train=replace(base.train, examples=base.train.examples._replace(x=x)))
    sim, _ = run(Remembering(), "vectorized", bad)
    assert {client for _, client in seen(sim)} == {1, 2, 3}


def test_client_drawn_twice_uploads_twice_from_the_same_memory() -> None:
    problem = task(cohort=6, replacement=True)
    sim, records = run(Remembering(), "vectorized", problem)
    assert records[0][0].clients == 6
    for (trial, client), (_, rounds) in seen(sim).items():
        present = sum(
            any((b.trial, b.client) == (trial, client) for b in sim.planner.batches(r))
            for r in range(1, 7)
        )
        # Twice in one round still counts once: both copies start from the same memory.
        assert float(rounds) == present


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_full_pass_gives_the_full_gradient(engine: str) -> None:
    problem = task(cohort=4)
    sim, _ = run(FullGradient(lr=0.3), engine, problem)
    again = Simulation(
        problem,
        sim.trials,
        rounds=1,
        device=sim.device,
        dtype=sim.dtype,
        engine=engine,  # type: ignore[arg-type]
    )
    start = {n: p[0].clone().requires_grad_() for n, p in again.snapshot.params.items()}
    again.run_round()
    x, y = problem.train.examples
    expected = {n: p.detach().clone() for n, p in start.items()}
    for client in range(4):
        first, last = problem.train.offsets[client : client + 2]
        logits = x[first:last].double() @ start["weight"].T + start["bias"]
        loss = nn.functional.cross_entropy(logits, y[first:last])
        grads = torch.autograd.grad(loss, list(start.values()))
        for name, grad in zip(start, grads, strict=True):
            expected[name] -= 0.3 * grad * SIZES[client] / sum(SIZES)
    for name, value in expected.items():
        torch.testing.assert_close(again.snapshot.params[name][0], value, rtol=0, atol=1e-12)


def test_mixed_structures_are_rejected() -> None:
    pair = [Trial.of("fedavg"), Trial.of("fedzmg")]
    with pytest.raises(ValueError, match="fedavg and fedzmg differ in more than numbers"):
        simulate(task(), pair)
