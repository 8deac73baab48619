"""The parts of the contract that the built-in algorithms leave unused: memory, looks, epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedzmg import Algorithm, Task, Tree, Trial, simulate
from fedzmg.algorithms import Average
from fedzmg.contract import (
    ClientContext,
    ClientRule,
    FullPass,
    FullPassTiming,
    Number,
    State,
    Upload,
    number,
)
from fedzmg.simulation import Simulation

SIZES = [5, 12, 8, 3]


def task(**protocol: Any) -> Task:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(4), SIZES)
    x, y = rng.normal(size=(len(owner), 3)), rng.integers(0, 2, len(owner))
    settings = {"batch_size": 4, "epochs": 3, "cohort": 2, "rounds": 6, **protocol}
    return Task.from_arrays(nn.Linear(3, 2), x, y, owner, test=(x, y), **settings)


@dataclass(frozen=True)
class Remembering(ClientRule):
    """Adds its own earlier updates to its gradient and counts its rounds."""

    lr: Number = number(0.1, above=0, doc="learning rate")

    def init_memory(self, params: Tree) -> State:
        return params.zeros(), next(iter(params.values())).new_zeros(())

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        past, _ = context.memory
        return params - self.lr * (grad + 0.1 * past), scratch

    def finish(
        self, context: ClientContext, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        past, rounds = context.memory
        delta = context.params - params
        return Upload(delta), (past + delta, rounds + 1)


@dataclass(frozen=True)
class Looking(ClientRule):
    """One full-gradient step from the full_pass, and nothing else."""

    lr: Number = number(0.1, above=0, doc="learning rate")

    @property
    def full_pass(self) -> FullPassTiming:
        return "start"

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        assert isinstance(full_pass, FullPass)
        return full_pass.grad

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        return context.params - self.lr * scratch, scratch


@dataclass(frozen=True)
class Stopping(ClientRule):
    """Stops after ``epochs`` epochs; remembers the loss it was shown last."""

    epochs: Number = number(1.0, low=0, doc="epochs to train")
    sees: FullPassTiming = "epochs"

    @property
    def full_pass(self) -> FullPassTiming:
        return self.sees

    @property
    def uses_epoch_end(self) -> bool:
        return True

    def init_memory(self, params: Tree) -> State:
        return next(iter(params.values())).new_zeros(2)

    def begin(self, context: ClientContext, full_pass: FullPass | tuple[()]) -> State:
        assert isinstance(full_pass, FullPass) == (self.sees == "epochs")
        return context.memory * 0

    def step(
        self, context: ClientContext, params: Tree, scratch: State, grad: Tree
    ) -> tuple[Tree, State]:
        return params - 0.1 * grad, scratch

    def end_epoch(self, scratch: State, loss: Tensor) -> tuple[State, Tensor | bool]:
        after = torch.stack([scratch[0] + 1, loss])
        return after, after[0] < self.epochs

    def finish(
        self, context: ClientContext, params: Tree, scratch: State, steps: Tensor
    ) -> tuple[Upload, State]:
        return Upload(context.params - params), scratch


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


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_memory_counts_the_rounds_each_client_took_part_in(engine: str) -> None:
    sim, _ = run(Remembering(), engine)
    taken = np.zeros((2, 4))
    for round_ in range(1, 7):
        for batch in sim.planner.batches(round_):
            taken[batch.trial, batch.client] += 1
    for (trial, client), (_, rounds) in seen(sim).items():
        assert float(rounds) == taken[trial, client]
    assert len(seen(sim)) == (taken > 0).sum()


def test_memory_loop_equals_map() -> None:
    a, _ = run(Remembering(), "sequential")
    b, _ = run(Remembering(), "vectorized")
    for name, leaf in a.snapshot.params.items():
        torch.testing.assert_close(leaf, b.snapshot.params[name], rtol=0, atol=1e-9)


def test_memory_survives_a_resume() -> None:
    whole, _ = run(Remembering(), "vectorized")
    trials = whole.trials
    options: dict[str, Any] = {
        "rounds": 6, "device": torch.device("cpu"), "dtype": torch.float64, "engine": "vectorized"
    }  # fmt: skip
    first = Simulation(task(), trials, **options)
    for _ in range(3):
        first.run_round()
    second = Simulation(task(), trials, restored=[first.checkpoint(i) for i in range(2)], **options)
    for _ in range(3):
        second.run_round()
    for name, leaf in whole.snapshot.params.items():
        assert torch.equal(leaf, second.snapshot.params[name])


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
def test_a_look_is_the_full_gradient(engine: str) -> None:
    problem = task(cohort=4)
    sim, _ = run(Looking(lr=0.3), engine, problem)
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


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, [2, 3, 2, 1]), (2, [4, 6, 4, 2]), (9, [6, 9, 6, 3])]
)
def test_a_rule_can_stop_after_an_epoch(engine: str, epochs: int, steps: list[int]) -> None:
    _, records = run(Stopping(epochs=float(epochs)), engine, task(cohort=4))
    assert records[0][0].steps == sum(steps)


@pytest.mark.parametrize("sees", ["epochs", "never"])
def test_epoch_losses_agree_between_engines(sees: FullPassTiming) -> None:
    loop, _ = run(Stopping(2.0, sees), "sequential")
    mapped, _ = run(Stopping(2.0, sees), "vectorized")
    assert seen(loop).keys() == seen(mapped).keys()
    for owner, state in seen(loop).items():
        torch.testing.assert_close(state, seen(mapped)[owner], rtol=0, atol=1e-9)


def test_mixed_structures_are_refused() -> None:
    pair = [Trial.of("fedavg"), Trial.of("fedzmg")]
    with pytest.raises(ValueError, match="fedavg and fedzmg differ in more than numbers"):
        simulate(task(), pair)
