"""T1 to T3: the operator, the descent inequality, and the removed variance."""

from __future__ import annotations

import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.finding import Finding, Size, Value
from fedzmg.theory.problems import REAL, normal, seeded

DIMS = 12
STEP = 0.5
"""Step of T2, in units of 1/L."""


def operator(size: Size) -> Finding:
    """T1: the projection is symmetric, idempotent, non-expansive, and obeys the identity."""
    pairs = min(1000, size.samples)
    generator = seeded(1)
    a, b = normal(generator, 2, pairs, DIMS) + 3.0 * normal(generator, 2, pairs, 1)
    phi_a, phi_b = descent.zero_mean(a), descent.zero_mean(b)
    identity = ((a - b) ** 2).sum(-1) - DIMS * (a.mean(-1) - b.mean(-1)) ** 2
    distance = ((phi_a - phi_b) ** 2).sum(-1)
    ratio = phi_a.norm(dim=-1) / a.norm(dim=-1)
    removed = 1.0 - (phi_a**2).sum(-1) / (a**2).sum(-1)
    intensity = DIMS * a.mean(-1) ** 2 / (a**2).sum(-1)
    return Finding(
        "T1",
        "Geometry of the projection",
        "Phi is symmetric, idempotent and non-expansive; "
        "|Phi a - Phi b|^2 = |a - b|^2 - d (mean a - mean b)^2",
        f"{pairs:,} random pairs, d = {DIMS}, means with standard deviation 3",
        (
            Value("|<Phi a, b> - <a, Phi b>|, largest", 0.0,
                  _largest((phi_a * b).sum(-1) - (a * phi_b).sum(-1)), 1e-11, stated=True),
            Value("|Phi Phi a - Phi a|, largest", 0.0, _largest(descent.zero_mean(phi_a) - phi_a),
                  1e-12, stated=True),
            Value("|Phi a| / |a|, largest", 1.0, float(ratio.max()), 1e-12, "at most", stated=True),
            Value("error of the identity, largest", 0.0, _largest(distance - identity), 1e-10,
                  stated=True),
            Value("sum of the entries of Phi a, largest", 0.0, _largest(phi_a.sum(-1)), 1e-12),
            Value("share of |a|^2 removed, mean", float(intensity.mean()), float(removed.mean()),
                  1e-12),
        ),
    )  # fmt: skip


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def descent_inequality(size: Size) -> Finding:
    """T2: guarantee of a step of ``1 / (2 L)`` on an L-smooth function."""
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
    gain = 0.5 * (curvature * (x**2 - moved**2)).sum(-1)
    worst = float((gain * smooth / (gradient**2).sum(-1)).min())
    return Finding(
        "T2",
        "Descent inequality",
        "a step of 1/(2L) gives F(y) < F(x) - |grad F(x)|^2 / (2L)",
        "F = (L/2) x^2, L = 2, x = 3; then random L-smooth quadratics",
        (
            Value("F(y) after the step 1/(2L)", value(at) - decrease, half, 0.0, "at most", True),
            Value("F(y), bound with 3/(8L)", value(at) - 0.75 * decrease, half, 1e-12),
            Value("F(y) after the step 1/L, bound with 1/(2L)", value(at) - decrease, full, 1e-12),
            Value("least gain of a step 1/(2L), in |grad|^2/L", 0.375, worst, 1e-12, "at least"),
        ),
        "with 3/(8L), or with the step 1/L",
    )


def variance(size: Size) -> Finding:
    """T3: the variance of projected noise is the trace less ``1' Sigma 1 / d``."""
    generator = seeded(3)
    generic = normal(generator, DIMS, DIMS)
    generic = generic @ generic.mT / DIMS
    trace = float(generic.trace())
    isotropic = trace / DIMS * torch.eye(DIMS, dtype=REAL)
    cases = {
        "generic covariance": generic,
        "isotropic": isotropic,
        "80 % along 1": intensity_noise(0.8, trace),
    }
    lines = []
    for name, covariance in cases.items():
        left, tolerance = _predicted_power(covariance, size)
        lines.append(
            Value(f"{name}: E |Phi noise|^2", left, _power(covariance, size, generator), tolerance,
                  stated=True)
        )  # fmt: skip
        lines.append(
            Value(f"{name}: share removed", 1.0 - left / trace, 1.0 - lines[-1].measured / trace,
                  tolerance / trace)
        )  # fmt: skip
    shares = [i / 10 for i in range(11)]
    measured = [
        1.0 - _power(intensity_noise(share, trace), size, generator) / trace for share in shares
    ]
    closed = [share + (1.0 - share) / DIMS for share in shares]
    errors = [abs(a - b) for a, b in zip(measured, closed, strict=True)]
    tolerance = _predicted_power(isotropic, size)[1] / trace
    lines.append(Value("rho + (1 - rho)/d, worst error of eleven rho", 0.0, max(errors), tolerance))
    return Finding(
        "T3",
        "Variance of the projected gradient (Lemma 2)",
        "E |Phi noise|^2 = tr Sigma - 1' Sigma 1 / d, so the gain is the share of intensity noise",
        f"d = {DIMS}, three covariances of trace {trace:.3g}, {size.samples:,} samples",
        tuple(lines),
        series={"measured": (shares, measured), "rho + (1 - rho)/d": (shares, closed)},
    )


def intensity_noise(share: float, trace: float) -> Tensor:
    """Build a covariance with this share of its trace along ones, the rest isotropic."""
    along = torch.full((DIMS, DIMS), 1.0 / DIMS, dtype=REAL)
    return trace * ((1.0 - share) / DIMS * torch.eye(DIMS, dtype=REAL) + share * along)


def _predicted_power(covariance: Tensor, size: Size) -> tuple[float, float]:
    """Compute ``tr Sigma - 1' Sigma 1 / d``, and five standard errors of its estimate."""
    dims = len(covariance)
    phi = torch.eye(dims, dtype=REAL) - 1.0 / dims
    left = phi @ covariance @ phi
    error = (2.0 * float((left**2).sum()) / size.samples) ** 0.5
    return float(covariance.trace() - covariance.sum() / dims), 5.0 * error


def _power(covariance: Tensor, size: Size, generator: torch.Generator) -> float:
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0.0).sqrt()
    noise = normal(generator, size.samples, DIMS) @ root.mT
    return float((descent.zero_mean(noise) ** 2).sum(-1).mean())
