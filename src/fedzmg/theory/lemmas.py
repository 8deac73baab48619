"""T1 to T3, T10, E10: the operator, descent, removed variance, and the theorem's constants."""

import math

import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.convergence import SETTING, Run, paired_run
from fedzmg.theory.descent import LOCAL_STEPS, Schedule, theorems_schedule
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, Quadratics, eye, normal, seeded, times

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
    found.zero("|<Phi a, b> - <a, Phi b>|, largest", skew, 1e-11, basis="claim")
    again = descent.zero_mean(phi_a) - phi_a
    found.zero("|Phi Phi a - Phi a|, largest", again, 1e-12, basis="claim")
    shorter = phi_a.norm(dim=-1) / a.norm(dim=-1)
    found.at_most("|Phi a| / |a|, largest", 1.0, shorter, 1e-12, basis="claim")
    found.zero("error of the identity, largest", distance - identity, 1e-10, basis="claim")
    found.zero("sum of the entries of Phi a, largest", phi_a.sum(-1), 1e-12)


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
    found.at_most("F(y) after the step 1/(2L)", bound, half, basis="claim")
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

    white = normal(generator, size.samples, DIMS)

    def measure(covariance: Tensor) -> float:
        values, vectors = torch.linalg.eigh(covariance)
        noise = white @ (vectors * values.clamp(min=0.0).sqrt()).mT
        return float((descent.zero_mean(noise) ** 2).sum(-1).mean())

    found.setting = f"d = {DIMS}, three covariances of trace {trace:.3g}, {size.samples:,} samples"
    for name, covariance in (
        ("generic covariance", generic), ("isotropic", mixed(0.0)), ("80 % along 1", mixed(0.8)),
    ):  # fmt: skip
        left, measured = float(covariance.trace() - covariance.sum() / DIMS), measure(covariance)
        room = tolerance(covariance)
        found.add(f"{name}: E |Phi noise|^2", left, measured, room, basis="claim")
        found.add(f"{name}: share removed", 1.0 - left / trace, 1.0 - measured / trace,
                  room / trace)  # fmt: skip
    shares = [i / 10 for i in range(11)]
    removed = [1.0 - measure(mixed(share)) / trace for share in shares]
    closed = [share + (1.0 - share) / DIMS for share in shares]
    errors = torch.tensor(removed, dtype=REAL) - torch.tensor(closed, dtype=REAL)
    found.zero("rho + (1 - rho)/d, worst error of eleven rho", errors,
               tolerance(mixed(0.0)) / trace)  # fmt: skip
    found.series = {"measured": (shares, removed), "rho + (1 - rho)/d": (shares, closed)}


def constant(problem: Quadratics, second_moment: Tensor | float, noise_dims: int) -> Tensor:
    """Compute ``6 L Gamma``, ``8 (E - 1)^2 G^2`` and the variance of averaged noise."""
    shift = 6.0 * problem.smoothness * problem.heterogeneity
    drift = 8.0 * (LOCAL_STEPS - 1) ** 2 * second_moment + torch.zeros_like(shift)
    noise = (problem.share**2).sum(-1) * descent.DEVIATION**2 * noise_dims
    return torch.stack([shift, drift, noise], -1)


def numerator(terms: Tensor, rate: Schedule, convexity: Tensor, start: Tensor) -> Tensor:
    """Compute ``delta = max(beta^2 C / (beta mu - 1), gamma |w_0 - w*|^2)``."""
    grown = rate.beta**2 * terms.sum(-1) / (rate.beta * convexity - 1.0)
    return torch.maximum(grown, rate.gamma * (start**2).sum(-1))


def _bound_inside(run: Run) -> float:
    """Compute ``delta`` of FedAvg's theorem on the hyperplane through the start."""
    problem = run.problem
    inside = problem.restricted(run.start, descent.hyperplane_basis(problem.dims))
    terms = constant(inside, run.projected_moment, problem.dims - 1)
    start = run.start - problem.constrained_optimum(run.start)
    return float(numerator(terms, theorems_schedule(problem), inside.convexity, start))


@check("E10", "All constants under Lemma 1's condition")
def _constants_inside(size: Size, found: Finding) -> None:
    """If 1'(w_0 - w*) = 0, FedZMG has no larger L, 1/mu, Gamma, G, noise or bound than FedAvg."""
    found.setting = f"{size.problems} random problems, G of the first gradients"
    generator = seeded(110)
    problem = Quadratics.draw(generator, size.problems, 8)
    rate, basis = theorems_schedule(problem), descent.hyperplane_basis(problem.dims)
    way = descent.zero_mean(normal(generator, size.problems, problem.dims))
    off = (problem.optimum + way)[:, None] - problem.centre
    inside = problem.restricted((problem.optimum + way)[:, None], basis)
    gradients = times(problem.curvature, off)
    moments = [(g**2).sum(-1).amax(-1) for g in (gradients, descent.zero_mean(gradients))]
    both = zip((problem, inside), moments, strict=True)
    deltas = [numerator(constant(p, g, p.dims), rate, p.convexity, way) for p, g in both]
    # w* is on the hyperplane: F* stays. Each F_k* becomes a minimum over fewer models and rises, on
    # quadratics by s_k^2 / (2 1'A_k^-1 1), so Gamma = F* - sum_k p_k F_k* falls by their mean.
    flat = torch.linalg.solve(problem.curvature, torch.ones_like(off)).sum(-1)
    fall = (problem.share * off.sum(-1) ** 2 / (2.0 * flat)).sum(-1)
    for name, ratio in (
        ("L", inside.smoothness / problem.smoothness),
        ("1/mu", problem.convexity / inside.convexity),
        ("Gamma", inside.heterogeneity / problem.heterogeneity),
        ("G^2", moments[1] / moments[0]), ("delta", deltas[1] / deltas[0]),
    ):  # fmt: skip
        found.at_most(f"{name} on the hyperplane / {name}, largest", 1.0, ratio, 1e-9)
    found.zero("fall of Gamma - sum_k p_k s_k^2/(2 1'A_k^-1 1), largest",
               problem.heterogeneity - inside.heterogeneity - fall, 1e-9)  # fmt: skip
    elsewhere = problem.restricted((problem.optimum + way + 3.0)[:, None], basis)
    rises = (elsewhere.heterogeneity > problem.heterogeneity).sum()
    found.at_least("3 added to w_0: problems whose Gamma rises, at least", 1, rises)


@check("T10", "The constant C, and the bound beside the run")
def _constants(size: Size, found: Finding) -> None:
    """C is strictly smaller for FedZMG, and E |w_t - w*|^2 <= delta/(gamma + t)."""
    run, other = paired_run(5, 0.0, size), paired_run(6, 1.0, size)
    problem, dims = run.problem, run.problem.dims
    rate = theorems_schedule(problem)
    start = run.start - problem.optimum
    plain = constant(problem, run.second_moment, dims)
    # The paper keeps L, Gamma and G of FedAvg: only the noise is projected.
    projected = constant(problem, run.second_moment, dims - 1)
    deltas = (numerator(terms, rate, problem.convexity, start) for terms in (plain, projected))
    delta_plain, delta = map(float, deltas)
    delta_inside, delta_other = _bound_inside(run), _bound_inside(other)
    noise = descent.isotropic(10, len(problem.share), size.samples // 10, dims)()
    averaged = (problem.share[:, None, None] * noise).sum(0)
    centred = descent.zero_mean(averaged)
    end = run.steps[-1]
    limit = descent.asymptotic_constant(problem, rate, descent.hyperplane_basis(dims)) / end
    final = delta / (rate.gamma + end)
    tolerance = 3.0 / size.repetitions**0.5 + 300.0 / end
    saved = 1.0 - projected.sum() / plain.sum()
    found.at_least("1 - FedZMG's C / FedAvg's C, above 0", 0.0, saved, -1e-12, basis="claim")
    for name, own, bound in (("FedAvg", run.plain, delta_plain), ("FedZMG", run.projected, delta)):
        worst = _tightest(run, own, bound)
        found.at_most(f"{name}: measured / bound, largest", 1.0, worst, basis="claim")
    for name, terms, part in (("FedAvg", plain, averaged), ("FedZMG", projected, centred)):
        power = (part**2).sum(-1).mean()
        found.add(f"noise term, {name}", float(terms[-1]), power, 0.05, "relative")
    found.setting = f"{SETTING}, the run of T5, G^2 measured along it: 6 L Gamma = {plain[0]:.0f}, "
    found.setting += f"8 (E-1)^2 G^2 = {plain[1]:,.0f}"
    found.at_most("noise term / C, at most a thousandth", 1e-3, projected[-1] / projected.sum())
    found.add("FedZMG: bound / measured at T", final / limit, final / run.projected[-1], tolerance,
              "relative")  # fmt: skip
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


def _tightest(run: Run, measured: list[float], delta: float) -> float:
    gamma = theorems_schedule(run.problem).gamma
    return max(m * (gamma + t) / delta for t, m in zip(run.steps, measured, strict=True))
