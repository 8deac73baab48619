"""Problems and descent against the golden numbers and independent ways to the same answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedzmg.theory import descent
from fedzmg.theory.logistic import regressions
from fedzmg.theory.problems import REAL, Quadratics, hyperplane_basis, normal, quadratics, seeded

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
    assert float(problem.constrained_gap(start)) == pytest.approx(limits["gap_formula"])
    assert float(problem.gap(inside)) == pytest.approx(limits["gap_formula"])


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
    problem = quadratics(generator, clients=3, dims=dims)
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


def test_extreme_eigenvalues_are_those_asked_for() -> None:
    problem = quadratics(seeded(0), problems=(5,))
    torch.testing.assert_close(problem.smoothness, torch.full((5,), 4.0, dtype=REAL))
    torch.testing.assert_close(problem.convexity, torch.ones(5, dtype=REAL))
    torch.testing.assert_close(problem.share.sum(-1), torch.ones(5, dtype=REAL))


def test_basis_spans_the_zero_sum_vectors() -> None:
    basis = hyperplane_basis(7)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6, dtype=REAL))
    assert float(basis.sum(0).abs().max()) < 1e-14


def test_expected_distances_without_noise_are_those_of_the_run() -> None:
    generator = seeded(3)
    problem = quadratics(generator, clients=3, dims=4)
    start, rate = normal(generator, 4), descent.theorems_schedule(problem)
    both = (descent.zero_mean, descent.identity)
    exact = descent.expected_distances(
        problem, start, problem.optimum, rate, steps=20, projections=both, deviation=0.0
    )
    for state in descent.descend(problem, start, rate, steps=20, projections=both):
        if state.step % 5 == 0:
            off = [float(((one - problem.optimum) ** 2).sum()) for one in state.server]
            assert exact[state.step] == pytest.approx(off)


def test_expected_distances_of_one_noisy_step_by_hand() -> None:
    """From the optimum of equal clients, one step of size n adds n^2 sigma^2 d sum p^2."""
    eye = torch.eye(3, dtype=REAL)
    share = torch.tensor([0.25, 0.75], dtype=REAL)
    problem = Quadratics(eye.expand(2, 3, 3), torch.zeros(2, 3, dtype=REAL), share)
    exact = descent.expected_distances(
        problem, problem.optimum, problem.optimum, lambda _: 0.1, steps=1, local_steps=1,
        projections=(descent.zero_mean, descent.identity), deviation=0.5,
    )  # fmt: skip
    power = 0.01 * 0.25 * (0.25**2 + 0.75**2)
    assert exact[1] == pytest.approx([2 * power, 3 * power])


def test_asymptotic_constant_is_where_the_exact_expectation_goes() -> None:
    """One client and one dimension: t E w_t^2 -> beta^2 s^2 / (2 beta a - 1)."""
    one = torch.ones(1, 1, 1, dtype=REAL)
    problem = Quadratics(2.0 * one, torch.zeros(1, 1, dtype=REAL), torch.ones(1, dtype=REAL))
    rate = descent.Schedule(1.0, 16.0)
    constant = descent.asymptotic_constant(problem, rate, torch.ones(1, 1, dtype=REAL))
    assert constant == pytest.approx(0.25 / 3)
    exact = descent.expected_distances(
        problem, problem.optimum, problem.optimum, rate, steps=2000,
        projections=(descent.identity,),
    )  # fmt: skip
    assert exact[2000][0] * 2000 == pytest.approx(constant, rel=0.02)


def test_logistic_gradients_and_hessians_are_derivatives_of_the_loss() -> None:
    problem = regressions(seeded(4), clients=3, examples=10)
    point = normal(seeded(5), problem.dims).requires_grad_()
    [gradient] = torch.autograd.grad(problem.value(point), [point])
    everywhere = point.detach().expand(1, 3, problem.dims)
    torch.testing.assert_close(problem.gradients(everywhere).mean((0, 1)), gradient)
    curvature = torch.autograd.functional.hessian(problem.value, point.detach())
    torch.testing.assert_close(problem.hessian(point.detach()), curvature)
