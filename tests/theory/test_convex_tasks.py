"""Convex tasks: known optima, and distances that every algorithm reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedzmg import Trial, algorithms, simulate, tasks
from fedzmg.tasks.convex import Convex, Problem

NAMES = ("quadratic", "logistic")


def preset(name: str) -> Convex:
    found = tasks.info(name).preset
    assert isinstance(found, Convex)
    return found


def gradient(name: str, problem: Problem, weights: np.ndarray) -> np.ndarray:
    task = tasks.get(name)
    model = torch.tensor(weights[None], requires_grad=True)
    column = task.model.to(torch.device("cpu"), torch.float64)
    outputs = column.evaluate(
        column.params().map(lambda _: model), torch.tensor(problem.x, dtype=torch.float64)
    )
    loss = task.loss(outputs, torch.tensor(problem.y, dtype=torch.float64)).mean()
    [found] = torch.autograd.grad(loss, [model])
    return found[0].numpy()


@pytest.mark.parametrize("name", NAMES)
def test_optima_are_stationary(name: str) -> None:
    problem = preset(name).problem()
    assert np.abs(gradient(name, problem, problem.optimum)).max() < 1e-10
    inside = gradient(name, problem, problem.constrained)
    # On the hyperplane the gradient is normal to it: all entries are equal, and not zero.
    assert np.ptp(inside) < 1e-10
    assert np.abs(inside).max() > 1e-3
    assert problem.constrained.sum() == pytest.approx(problem.start.sum())
    assert (problem.start - problem.optimum).sum() == pytest.approx(12.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_start_that_meets_the_condition_has_one_optimum(name: str) -> None:
    problem = preset(name).with_options({"start": "zero_sum"}).problem()
    np.testing.assert_allclose(problem.constrained, problem.optimum, atol=1e-9)


def test_quadratic_has_known_curvature() -> None:
    problem = preset("quadratic").problem()
    for client in range(8):
        x = problem.x[problem.owners == client]
        values = np.linalg.eigvalsh(x.T @ x / len(x))
        assert values[[0, -1]] == pytest.approx([1.0, 4.0])


@pytest.mark.parametrize("name", NAMES)
def test_descriptions_match_the_tasks(name: str) -> None:
    task, shown = tasks.get(name), tasks.info(name).describe()
    assert (len(task.train), task.name) == (shown["clients"], name)
    assert shown["protocol"] == vars(task.protocol)
    assert task.model_bytes == shown["model"]["bytes"]
    assert {field["key"] for field in shown["fields"]} == {
        "preset.start", "preset.distance", "preset.problem_seed",
    }  # fmt: skip
    assert tasks.get(name, {"problem_seed": 1}).fingerprint() != task.fingerprint()


@pytest.mark.parametrize("algorithm", ["scaffold", "fedavg"])
def test_full_batches_lead_to_the_optimum(algorithm: str) -> None:
    task = tasks.get("quadratic")
    protocol = replace(task.protocol, batch_size=60, epochs=2, eval_every=39)
    [history] = simulate(
        replace(task, protocol=protocol), [Trial.of(algorithm, client_lr=0.1)], rounds=40,
        device="cpu", dtype=torch.float64, engine="vectorized",
    )  # fmt: skip
    weights = history.params["weight"][0].numpy()
    distance = float(((weights - preset("quadratic").problem().optimum) ** 2).sum())
    assert history.metrics[-1] == pytest.approx(distance, rel=1e-6, abs=1e-18)
    # Local steps bend FedAvg's path; SCAFFOLD corrects that.
    assert distance < (1e-10 if algorithm == "scaffold" else 1e-1)
    assert algorithm == "scaffold" or distance > 1e-5


@pytest.mark.parametrize(
    ("name", "distance", "lr"),
    [
        ("quadratic", "optimum", 0.3),
        ("quadratic", "constrained", 0.3),
        ("logistic", "optimum", 2.0),
    ],
)
def test_projected_clients_go_to_the_constrained_optimum(
    name: str, distance: str, lr: float
) -> None:
    """One full-batch step a round has no drift: the limit is exact."""
    task, rounds = tasks.get(name, {"distance": distance}), 80 if name == "logistic" else 40
    protocol = replace(task.protocol, batch_size=60, epochs=1, eval_every=rounds - 1)
    trial = Trial.of("fedzmg", client_lr=lr, client_momentum=0.0, client_decay=0.0)
    [history] = simulate(
        replace(task, protocol=protocol), [trial], rounds=rounds, device="cpu",
        dtype=torch.float64, engine="vectorized",
    )  # fmt: skip
    problem = preset(name).problem()
    weights = history.params["weight"][0].numpy()
    assert ((weights - problem.constrained) ** 2).sum() < 1e-6
    target = problem.optimum if distance == "optimum" else problem.constrained
    assert history.metrics[-1] == pytest.approx(((weights - target) ** 2).sum(), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algorithm", list(algorithms.ALGORITHMS))
def test_every_algorithm_runs(name: str, algorithm: str) -> None:
    task = tasks.get(name)
    [history] = simulate(task, [Trial.of(algorithm)], rounds=5, device="cpu", engine="vectorized")
    assert np.isfinite(history.metrics[-1])
