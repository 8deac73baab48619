"""Convex problems, tasks and descent against golden numbers and independent answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg import Trial, simulate, tasks
from fedzmg.tasks.convex import Convex, Problem
from fedzmg.theory import descent
from fedzmg.theory.problems import REAL, Logistic, Quadratics, normal, seeded

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text())["p3"]


def golden_problem() -> tuple[Quadratics, torch.Tensor]:
    given_ = GOLDEN["problem"]
    curvature = torch.stack([torch.diag(torch.tensor(given_["H"][k], dtype=REAL)) for k in "AB"])
    centre = torch.tensor([given_["c"][k] for k in "AB"], dtype=REAL)
    counts = torch.tensor([given_["n"][k] for k in "AB"], dtype=REAL)
    return Quadratics(curvature, centre, counts / counts.sum()), torch.tensor(
        given_["w0"], dtype=REAL
    )


def test_optima_of_the_golden_problem() -> None:
    problem, start = golden_problem()
    limits = GOLDEN["limits"]
    assert problem.optimum.tolist() == pytest.approx(limits["unconstrained_optimum"])
    inside = problem.constrained_optimum(start)
    assert inside.tolist() == pytest.approx(limits["constrained_optimum"])
    assert float(problem.value(problem.optimum)) == pytest.approx(limits["F_star"])
    assert float(problem.value(inside)) == pytest.approx(limits["F_constrained"])
    for gap in (problem.constrained_gap(start), problem.gap(inside)):
        assert float(gap) == pytest.approx(limits["gap_formula"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"projections": (descent.identity,)}),
        ("fedzmg_lambda0", {}),
        ("fedzmg_lambda_0.01", {"decay": 0.01}),
        ("fedzmg_momentum", {"momentum": 0.9}),
        ("fedzmg_paper_settings", {"momentum": 0.9, "decay": 5e-4}),
        ("fedzmg_server_lr_0.5", {"server_rate": 0.5, "momentum": 0.9, "decay": 5e-4}),
    ],
)
def test_rounds_are_the_golden_ones(name: str, options: dict[str, object]) -> None:
    problem, start = golden_problem()
    states = descent.descend(
        problem, start, lambda _: 0.1, steps=4, local_steps=2, **options  # type: ignore[arg-type]
    )  # fmt: skip
    ends = [state.server[0][0].tolist() for state in states if state.step % 2 == 0]
    for found, wanted in zip(ends, GOLDEN["algorithms"][name]["rounds"], strict=True):
        assert found == pytest.approx(wanted["w"], abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 7))
def test_constrained_optimum_solves_the_kkt_system(seed: int, rows: int, dims: int) -> None:
    generator = seeded(seed)
    problem = Quadratics.draw(generator, 3, dims=dims)
    rows = min(rows, dims - 1)
    constraints, start = normal(generator, rows, dims), normal(generator, dims)
    pull = sum(
        p * a @ c for p, a, c in zip(problem.share, problem.curvature, problem.centre, strict=True)
    )
    system = np.block(
        [[problem.mean_curvature.numpy(), constraints.numpy().T],
         [constraints.numpy(), np.zeros((rows, rows))]]
    )  # fmt: skip
    right = np.concatenate([np.asarray(pull), (constraints @ start).numpy()])
    wanted = np.linalg.solve(system, right)[:dims]
    found = problem.constrained_optimum(start, constraints)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)
    assert float(problem.constrained_gap(start, constraints)) == pytest.approx(
        float(problem.gap(found)), rel=1e-6, abs=1e-9
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_heterogeneity_falls_on_a_hyperplane_through_the_optimum(
    seed: int, clients: int, dims: int, through: bool
) -> None:
    """Under Lemma 1's condition Gamma can only fall; elsewhere it falls or rises."""
    generator = seeded(seed)
    problem = Quadratics.draw(generator, clients, dims=dims, eigenvalues=(0.1, 4.0))
    way = normal(generator, dims)
    start = problem.optimum + (way - way.mean() if through else way)

    def least(curvature: torch.Tensor, pull: torch.Tensor, sum_: float) -> float:
        """Minimise w'Aw/2 - b'w under 1'w = s by its KKT system."""
        ones = np.ones((dims, 1))
        system = np.block([[curvature.numpy(), ones], [ones.T, np.zeros((1, 1))]])
        w = np.linalg.solve(system, np.append(pull.numpy(), sum_))[:dims]
        return float(w @ curvature.numpy() @ w / 2 - pull.numpy() @ w)

    pulls = (problem.curvature @ problem.centre[..., None])[..., 0]
    whole = least(problem.mean_curvature, problem.share @ pulls, float(start.sum()))
    own = [least(a, b, float(start.sum())) for a, b in zip(problem.curvature, pulls, strict=True)]
    inside = whole - float(problem.share @ torch.tensor(own, dtype=REAL))
    restricted = problem.restricted(start, descent.hyperplane_basis(dims))
    assert float(restricted.heterogeneity) == pytest.approx(inside, rel=1e-6, abs=1e-9)
    if through:
        assert inside <= float(problem.heterogeneity) + 1e-9


def test_expected_distances_without_noise_are_those_of_the_run() -> None:
    generator = seeded(3)
    problem = Quadratics.draw(generator, 3, dims=4)
    start, rate = normal(generator, 4), descent.theorems_schedule(problem)
    both = (descent.zero_mean, descent.identity)
    exact = descent.expected_distances(
        problem, start, rate, steps=20, projections=both, deviation=0.0
    )
    for state in descent.descend(problem, start, rate, steps=20, projections=both):
        if state.step % 5 == 0:
            off = [float(((one - problem.optimum) ** 2).sum()) for one in state.server]
            assert exact[state.step] == pytest.approx(off)


def test_logistic_gradients_and_hessians_are_derivatives_of_the_loss() -> None:
    problem = Logistic.draw(seeded(4), bias=True)
    # The last feature of a positive example is 1, of a negative one -1.
    plain = Logistic.draw(seeded(4))
    torch.testing.assert_close(problem.signed[..., :-1], plain.signed)
    assert problem.signed[..., -1].unique().tolist() == [-1.0, 1.0]
    point = normal(seeded(5), problem.dims).requires_grad_()
    [gradient] = torch.autograd.grad(problem.value(point), [point])
    everywhere = point.detach().expand(6, 1, problem.dims)
    torch.testing.assert_close(problem.gradients(everywhere).mean((0, 1)), gradient)
    curvature = torch.autograd.functional.hessian(problem.value, point.detach())
    torch.testing.assert_close(problem.hessian(point.detach()), curvature)


def preset(name: str) -> Convex:
    found = tasks.info(name)
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


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_optima_are_stationary(name: str) -> None:
    problem = preset(name).problem()
    assert np.abs(gradient(name, problem, problem.optimum)).max() < 1e-10
    inside = gradient(name, problem, problem.constrained)
    # On the hyperplane the gradient is normal to it: all entries are equal, and not zero.
    assert np.ptp(inside) < 1e-10
    assert np.abs(inside).max() > 1e-3
    assert problem.constrained.sum() == pytest.approx(problem.start.sum())
    assert (problem.start - problem.optimum).sum() == pytest.approx(12.0)
    met = preset(name).with_options({"start": "zero_sum"}).problem()
    np.testing.assert_allclose(met.constrained, met.optimum, atol=1e-9)


def test_quadratic_has_known_curvature() -> None:
    problem = preset("quadratic").problem()
    for client in range(8):
        x = problem.x[problem.owners == client]
        values = np.linalg.eigvalsh(x.T @ x / len(x))
        assert values[[0, -1]] == pytest.approx([1.0, 4.0])


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
