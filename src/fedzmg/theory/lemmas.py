"""T1 to T3 and T10: the operator, descent, removed variance, and the constant of the theorem."""

import math

import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.convergence import SETTING, Run, paired_run
from fedzmg.theory.descent import LOCAL_STEPS, Schedule, theorems_schedule
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, Quadratics, eye, normal, seeded, square, times

DIMS = 12
STEP = 0.5  # step of T2, in units of 1/L


@check("T1", "Geometry of the projection")
def _operator(size: Size, found: Finding) -> None:
    """Phi is symmetric, idempotent and non-expansive.

    |Phi a - Phi b|^2 = |a - b|^2 - d (mean a - mean b)^2.
    """
    pairs = min(1000, size.samples)
    found.setting = f"{pairs:,} random pairs, d = {DIMS}, means with standard deviation 3"
    generator = seeded(1)
    a, b = normal(generator, 2, pairs, DIMS) + 3.0 * normal(generator, 2, pairs, 1)
    phi_a, phi_b = descent.zero_mean(a), descent.zero_mean(b)
    identity = ((a - b) ** 2).sum(-1) - DIMS * (a.mean(-1) - b.mean(-1)) ** 2
    skew = (phi_a * b).sum(-1) - (a * phi_b).sum(-1)
    distance = ((phi_a - phi_b) ** 2).sum(-1)
    power = (a**2).sum(-1)
    found.zero("|<Phi a, b> - <a, Phi b>|, largest", skew, 1e-11, stated=True)
    found.zero("|Phi Phi a - Phi a|, largest", descent.zero_mean(phi_a) - phi_a, 1e-12, stated=True)
    shorter = phi_a.norm(dim=-1) / a.norm(dim=-1)
    found.at_most("|Phi a| / |a|, largest", 1.0, shorter, 1e-12, stated=True)
    found.zero("error of the identity, largest", distance - identity, 1e-10, stated=True)
    found.zero("sum of the entries of Phi a, largest", phi_a.sum(-1), 1e-12)
    found.add("share of |a|^2 removed, mean", float((DIMS * a.mean(-1) ** 2 / power).mean()),
              (1.0 - (phi_a**2).sum(-1) / power).mean(), 1e-12)  # fmt: skip


@check("T2", "Descent inequality")
def _descent_inequality(size: Size, found: Finding) -> None:
    """A step of 1/(2L) gives F(y) < F(x) - |grad F(x)|^2 / (2L)."""
    found.remedy = "with 3/(8L), or with the step 1/L"
    found.setting = "F = (L/2) x^2, L = 2, x = 3; then random L-smooth quadratics"
    smooth, at = 2.0, 3.0

    def value(x: float) -> float:
        return 0.5 * smooth * x * x

    slope = smooth * at
    half, full = value(at - STEP * slope / smooth), value(at - slope / smooth)
    decrease = slope**2 / (2 * smooth)
    # Least gain of a step 1/(2 L) on random L-smooth quadratics, in units of |g|^2 / L.
    generator = seeded(2)
    curvature = smooth * torch.rand(size.samples // 100, DIMS, generator=generator, dtype=REAL)
    x = normal(generator, len(curvature), DIMS)
    gradient = curvature * x
    moved = x - STEP * gradient / smooth
    gain = 0.5 * (curvature * (x**2 - moved**2)).sum(-1) * smooth / (gradient**2).sum(-1)
    bound = value(at) - decrease
    found.at_most("F(y) after the step 1/(2L)", bound, half, stated=True)
    found.add("F(y), bound with 3/(8L)", value(at) - 0.75 * decrease, half, 1e-12)
    found.add("F(y) after the step 1/L, bound with 1/(2L)", bound, full, 1e-12)
    found.at_least("least gain of a step 1/(2L), in |grad|^2/L", 0.375, gain, 1e-12)


@check("T3", "Variance of the projected gradient (Lemma 2)")
def _variance(size: Size, found: Finding) -> None:
    """E |Phi noise|^2 = tr Sigma - 1' Sigma 1 / d, so the gain is the share of intensity noise."""
    generator = seeded(3)
    generic = normal(generator, DIMS, DIMS)
    generic = generic @ generic.mT / DIMS
    trace = float(generic.trace())
    phi = eye(DIMS) - 1.0 / DIMS

    def mixed(share: float) -> Tensor:
        """Build a covariance with this share of its trace along ones, the rest isotropic."""
        along = torch.full((DIMS, DIMS), 1.0 / DIMS, dtype=REAL)
        return trace * ((1.0 - share) / DIMS * eye(DIMS) + share * along)

    def tolerance(covariance: Tensor) -> float:
        return 5.0 * math.sqrt(2.0 * ((phi @ covariance @ phi) ** 2).sum() / size.samples)

    def measure(covariance: Tensor) -> float:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0.0).sqrt()
        noise = normal(generator, size.samples, DIMS) @ root.mT
        return float((descent.zero_mean(noise) ** 2).sum(-1).mean())

    found.setting = f"d = {DIMS}, three covariances of trace {trace:.3g}, {size.samples:,} samples"
    for name, covariance in (
        ("generic covariance", generic), ("isotropic", mixed(0.0)), ("80 % along 1", mixed(0.8)),
    ):  # fmt: skip
        left, measured = float(covariance.trace() - covariance.sum() / DIMS), measure(covariance)
        room = tolerance(covariance)
        found.add(f"{name}: E |Phi noise|^2", left, measured, room, stated=True)
        found.add(f"{name}: share removed", 1.0 - left / trace, 1.0 - measured / trace,
                  room / trace)  # fmt: skip
    shares = [i / 10 for i in range(11)]
    removed = [1.0 - measure(mixed(share)) / trace for share in shares]
    closed = [share + (1.0 - share) / DIMS for share in shares]
    errors = torch.tensor(removed, dtype=REAL) - torch.tensor(closed, dtype=REAL)
    found.zero("rho + (1 - rho)/d, worst error of eleven rho", errors,
               tolerance(mixed(0.0)) / trace)  # fmt: skip
    found.series = {"measured": (shares, removed), "rho + (1 - rho)/d": (shares, closed)}


def constant(problem: Quadratics, second_moment: float, noise_dims: int) -> list[float]:
    """Compute ``6 L Gamma``, ``8 (E - 1)^2 G^2`` and the variance of averaged noise."""
    return [
        6.0 * float(problem.smoothness * problem.heterogeneity),
        8.0 * (LOCAL_STEPS - 1) ** 2 * second_moment,
        float((problem.share**2).sum()) * descent.DEVIATION**2 * noise_dims,
    ]


def numerator(terms: list[float], rate: Schedule, convexity: float, start: float) -> float:
    """Compute ``delta = max(beta^2 C / (beta mu - 1), gamma |w_0 - w*|^2)``."""
    return max(rate.beta**2 * sum(terms) / (rate.beta * convexity - 1.0), rate.gamma * start)


def _bound_inside(run: Run) -> tuple[list[float], float]:
    """Compute ``C`` and ``delta`` of FedAvg's theorem on the hyperplane through the start."""
    problem = run.problem
    inside = problem.restricted(run.start, descent.hyperplane_basis(problem.dims))
    terms = constant(inside, run.projected_moment, problem.dims - 1)
    start = square(run.start - problem.constrained_optimum(run.start))
    return terms, numerator(terms, theorems_schedule(problem), float(inside.convexity), start)


@check("T10", "The constant C, and the bound beside the run")
def _constants(size: Size, found: Finding) -> None:
    """C is strictly smaller for FedZMG, and E |w_t - w*|^2 <= delta/(gamma + t)."""
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
    noise = descent.isotropic(10, len(problem.share), size.samples // 10, dims)()
    averaged = (problem.share[:, None, None] * noise).sum(0)
    gamma = 6.0 * float(problem.smoothness) * _gamma(run)
    end = run.steps[-1]
    limit = descent.asymptotic_constant(problem, rate, descent.hyperplane_basis(dims)) / end
    final = delta / (rate.gamma + end)
    tolerance = 3.0 / size.repetitions**0.5 + 300.0 / end
    saved = 1.0 - sum(projected) / sum(plain)
    found.at_least("1 - FedZMG's C / FedAvg's C, above 0", 0.0, saved, -1e-12, stated=True)
    for name, curve, bound in (
        ("FedAvg", run.plain, delta_plain), ("FedZMG", run.projected, delta),
    ):  # fmt: skip
        worst = _tightest(run, curve, bound)
        found.at_most(f"{name}: measured / bound, largest", 1.0, worst, stated=True)
    for name, terms, part in (
        ("FedAvg", plain, averaged), ("FedZMG", projected, descent.zero_mean(averaged)),
    ):  # fmt: skip
        found.add(f"noise term, {name}", terms[-1], (part**2).sum(-1).mean(), 0.05, "relative")
    found.add("6 L Gamma, from the last models", plain[0], gamma, 0.01, "relative")
    found.at_most("noise term / C, at most a thousandth", 1e-3, projected[-1] / sum(projected))
    found.add("FedZMG: bound / measured at T", final / limit, final / run.projected[-1], tolerance,
              "relative")  # fmt: skip
    ratio = sum(sharper) / sum(projected)
    found.at_most("constants on the hyperplane: C / the paper's", 1.0, ratio)
    inside = _tightest(run, run.projected, delta_inside)
    found.at_most("hyperplane bound: measured / bound, largest", 1.0, inside)
    inside = _tightest(other, other.projected, delta_other)
    found.at_most("the same for T6's start, distance to w_c", 1.0, inside)
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
    """Compute ``F - sum_k p_k F_k*`` at FedZMG's end, the optimum for this start."""
    problem = run.problem
    models = own = run.last.mean(0).expand_as(problem.centre)
    for _ in range(400):  # to every client's own minimum
        own = own - 0.25 * times(problem.curvature, own - problem.centre)
    return float(problem.share @ (problem.client_values(models) - problem.client_values(own)))
