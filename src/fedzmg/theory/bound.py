"""T10: the constant of the theorem, and its bound compared with measurements."""

from __future__ import annotations

from fedzmg.theory import descent
from fedzmg.theory.convergence import SETTING, Run, paired_run
from fedzmg.theory.descent import LOCAL_STEPS, Schedule, theorems_schedule
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import Quadratics, hyperplane_basis, square, times

DEVIATION = 0.5


def constant(problem: Quadratics, second_moment: float, noise_dims: int) -> list[float]:
    """Compute the terms of ``C`` for isotropic noise in ``noise_dims`` dimensions.

    They are ``6 L Gamma``, ``8 (E - 1)^2 G^2`` and the variance of the averaged noise.
    """
    return [
        6.0 * float(problem.smoothness * problem.heterogeneity),
        8.0 * (LOCAL_STEPS - 1) ** 2 * second_moment,
        float((problem.share**2).sum()) * DEVIATION**2 * noise_dims,
    ]


def numerator(terms: list[float], rate: Schedule, convexity: float, start: float) -> float:
    """Compute ``delta = max(beta^2 C / (beta mu - 1), gamma |w_0 - w*|^2)``."""
    return max(rate.beta**2 * sum(terms) / (rate.beta * convexity - 1.0), rate.gamma * start)


def _bound_inside(run: Run) -> tuple[list[float], float]:
    """Compute ``C`` and ``delta`` of FedAvg's theorem on the hyperplane through the start."""
    problem = run.problem
    inside = problem.restricted(run.start, hyperplane_basis(problem.dims))
    terms = constant(inside, run.projected_moment, problem.dims - 1)
    start = square(run.start - problem.constrained_optimum(run.start))
    return terms, numerator(terms, theorems_schedule(problem), float(inside.convexity), start)


@check(
    "T10",
    "The constant C, and the bound beside the run",
    "C is strictly smaller for FedZMG, and E |w_t - w*|^2 <= delta/(gamma + t)",
)
def _constants(size: Size, found: Finding) -> None:
    run, other = paired_run(5, 0.0, size), paired_run(6, 1.0, size)
    found.setting = f"{SETTING}, the run of T5; G^2 measured along it ({run.second_moment:.4g})"
    problem, dims = run.problem, run.problem.dims
    rate = theorems_schedule(problem)
    start = square(run.start - problem.optimum)
    plain = constant(problem, run.second_moment, dims)
    # The paper keeps L, Gamma and G of FedAvg: only the noise is projected.
    projected = constant(problem, run.second_moment, dims - 1)
    delta_plain, delta = (
        numerator(terms, rate, float(problem.convexity), start) for terms in (plain, projected)
    )
    sharper, delta_inside = _bound_inside(run)
    _, delta_other = _bound_inside(other)
    noise = descent.isotropic(
        10, len(problem.share), size.samples // 10, dims, deviation=DEVIATION
    )()
    averaged = (problem.share[:, None, None] * noise).sum(0)
    gamma = 6.0 * float(problem.smoothness) * _gamma(run)
    end = run.steps[-1]
    limit = descent.asymptotic_constant(problem, rate, hyperplane_basis(dims)) / end
    final = delta / (rate.gamma + end)
    tolerance = 3.0 / size.repetitions**0.5 + 300.0 / end
    found.add("1 - FedZMG's C / FedAvg's C, above 0", 0.0, 1.0 - sum(projected) / sum(plain),
              -1e-12, "at least", stated=True)  # fmt: skip
    found.add("FedAvg: measured / bound, largest", 1.0, _tightest(run, run.plain, delta_plain),
              rule="at most", stated=True)  # fmt: skip
    found.add("FedZMG: measured / bound, largest", 1.0, _tightest(run, run.projected, delta),
              rule="at most", stated=True)  # fmt: skip
    for name, terms, part in (
        ("FedAvg", plain, averaged), ("FedZMG", projected, descent.zero_mean(averaged)),
    ):  # fmt: skip
        power = (part**2).sum(-1).mean()
        found.add(f"noise term, {name}", terms[-1], power, 0.05, "relative")
    found.add("6 L Gamma, from the last models", plain[0], gamma, 0.01, "relative")
    found.add("noise term / C, at most a thousandth", 1e-3, projected[-1] / sum(projected),
              rule="at most")  # fmt: skip
    found.add("FedZMG: bound / measured at T", final / limit, final / run.projected[-1], tolerance,
              "relative")  # fmt: skip
    found.add("constants on the hyperplane: C / the paper's", 1.0, sum(sharper) / sum(projected),
              rule="at most")  # fmt: skip
    for name, one, bound in (
        ("hyperplane bound: measured / bound, largest", run, delta_inside),
        ("the same for T6's start, distance to w_c", other, delta_other),
    ):
        found.add(name, 1.0, _tightest(one, one.projected, bound), rule="at most")
    for name, bound in (
        ("FedAvg's bound", delta_plain), ("FedZMG's bound", delta),
        ("bound on the hyperplane", delta_inside),
    ):  # fmt: skip
        found.series[name] = (run.steps, [bound / (rate.gamma + t) for t in run.steps])
    found.series |= {"FedAvg": (run.steps, run.plain), "FedZMG": (run.steps, run.projected)}
    for name, terms in (
        ("terms of C", projected), ("terms of FedAvg's C", plain),
        ("terms of C on the hyperplane", sharper),
    ):  # fmt: skip
        found.series[name] = ([0.0, 1.0, 2.0], terms)


def _tightest(run: Run, measured: list[float], delta: float) -> float:
    gamma = theorems_schedule(run.problem).gamma
    return max(m * (gamma + t) / delta for t, m in zip(run.steps, measured, strict=True))


def _gamma(run: Run) -> float:
    """Compute ``F - sum_k p_k F_k*`` at FedZMG's end, the optimum for this start.

    Every client's own minimum is found by descent.
    """
    problem = run.problem
    models = own = run.last.mean(0).expand_as(problem.centre)
    for _ in range(400):
        own = own - 0.25 * times(problem.curvature, own - problem.centre)
    values = problem.client_values(models) - problem.client_values(own)
    return float(problem.share @ values)
