"""Strongly convex quadratics with known optima, unconstrained and on a hyperplane.

Client ``k`` minimises ``F_k(w) = (w - c_k)' A_k (w - c_k) / 2``; the federation minimises
``F = sum_k p_k F_k``. A leading axis holds many problems.
"""

from __future__ import annotations

import torch
from torch import Tensor

REAL = torch.float64


def seeded(seed: int) -> torch.Generator:
    """Create a random generator."""
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in double precision."""
    return torch.randn(shape, generator=generator, dtype=REAL)


def square(vector: Tensor) -> float:
    """Compute the squared norm."""
    return float((vector**2).sum())


class Quadratics:
    """Quadratics of clients: ``A_k`` ``[..., clients, d, d]``, ``c_k`` and weights ``p_k``."""

    def __init__(self, curvature: Tensor, centre: Tensor, share: Tensor) -> None:
        self.curvature, self.centre, self.share = curvature, centre, share
        self.dims = centre.shape[-1]
        self.mean_curvature = (share[..., None, None] * curvature).sum(-3)
        pull = (share[..., None] * (curvature @ centre[..., None]).squeeze(-1)).sum(-2)
        self.optimum: Tensor = torch.linalg.solve(self.mean_curvature, pull)
        eigenvalues: Tensor = torch.linalg.eigvalsh(curvature)
        self.smoothness = eigenvalues.amax((-1, -2))
        """``L``, the largest over clients."""
        self.convexity = eigenvalues.amin((-1, -2))
        """``mu``, the smallest over clients."""

    @property
    def ones(self) -> Tensor:
        """Normal of the hyperplane, as a constraint matrix of one row."""
        return torch.ones(1, self.dims, dtype=REAL)

    def client_values(self, models: Tensor) -> Tensor:
        """Compute ``F_k(w_k)`` of one model per client, ``[..., clients, d]``."""
        off = models - self.centre
        return 0.5 * (off * (self.curvature @ off[..., None]).squeeze(-1)).sum(-1)

    def value(self, model: Tensor) -> Tensor:
        """Compute ``F(w)``."""
        return (self.share * self.client_values(model[..., None, :])).sum(-1)

    def gap(self, model: Tensor) -> Tensor:
        """Compute ``F(w) - F*``."""
        off = model - self.optimum
        return 0.5 * (off * (self.mean_curvature @ off[..., None]).squeeze(-1)).sum(-1)

    @property
    def heterogeneity(self) -> Tensor:
        """``Gamma = F* - sum_k p_k F_k*``; every ``F_k*`` is zero here."""
        return self.value(self.optimum)

    def constrained_optimum(self, start: Tensor, constraints: Tensor | None = None) -> Tensor:
        """Minimise ``F`` under ``B w = B start``; ``B`` is one row of ones by default.

        By Lagrange: ``w = w* + A^-1 B' (B A^-1 B')^-1 B (start - w*)``.
        """
        rows = self.ones if constraints is None else constraints
        spread = rows.mT.expand(*start.shape[:-1], -1, -1)
        lifted: Tensor = torch.linalg.solve(self.mean_curvature, spread)
        off = (rows @ (start - self.optimum)[..., None]).squeeze(-1)
        inner: Tensor = torch.linalg.solve(rows @ lifted, off)
        return self.optimum + (lifted @ inner[..., None]).squeeze(-1)

    def constrained_gap(self, start: Tensor, constraints: Tensor | None = None) -> Tensor:
        """Compute ``F(w_c) - F* = s' (B A^-1 B')^-1 s / 2`` with ``s = B (start - w*)``.

        For one row of ones this is ``s^2 / (2 * 1' A^-1 1)``.
        """
        rows = self.ones if constraints is None else constraints
        off = (rows @ (start - self.optimum)[..., None]).squeeze(-1)
        schur = rows @ torch.linalg.solve(self.mean_curvature, rows.mT)
        inner: Tensor = torch.linalg.solve(schur, off)
        return 0.5 * (off * inner).sum(-1)

    def restricted(self, origin: Tensor, basis: Tensor) -> Quadratics:
        """Express the clients in ``z`` with ``w = origin + U z``, without additive constants."""
        curvature = basis.mT @ self.curvature @ basis
        pull = basis.mT @ self.curvature @ (self.centre - origin)[..., None]
        centre = torch.linalg.solve(curvature, pull).squeeze(-1)
        return Quadratics(curvature, centre, self.share)


def quadratics(
    generator: torch.Generator,
    *,
    problems: tuple[int, ...] = (),
    clients: int = 8,
    dims: int = 12,
    eigenvalues: tuple[float, float] = (1.0, 4.0),
    spread: float = 1.0,
) -> Quadratics:
    """Draw clients whose curvature has exactly these extreme eigenvalues.

    Centres are normal with standard deviation ``spread``; weights are those of clients that hold
    10 to 30 examples.
    """
    low, high = eigenvalues
    shape = (*problems, clients)
    rotation, _ = torch.linalg.qr(normal(generator, *shape, dims, dims))
    values = low + (high - low) * torch.rand(*shape, dims, generator=generator, dtype=REAL)
    values[..., 0], values[..., -1] = low, high
    curvature = rotation * values[..., None, :] @ rotation.mT
    counts = torch.randint(10, 31, shape, generator=generator).to(REAL)
    centre = spread * normal(generator, *shape, dims)
    return Quadratics(0.5 * (curvature + curvature.mT), centre, counts / counts.sum(-1, True))


def hyperplane_basis(dims: int) -> Tensor:
    """Return an orthonormal basis, as columns, of the vectors whose entries sum to zero."""
    whole = torch.eye(dims, dtype=REAL)
    whole[:, 0] = 1.0
    basis: Tensor = torch.linalg.qr(whole)[0]
    return basis[:, 1:]
