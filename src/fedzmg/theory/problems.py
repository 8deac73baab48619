"""Strongly convex problems with known optima, unconstrained and on a hyperplane.

Client ``k`` minimises ``F_k``, the federation ``F = sum_k p_k F_k`` with shares ``p_k``.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

REAL = torch.float64
eye = partial(torch.eye, dtype=REAL)


def seeded(seed: int) -> torch.Generator:
    """Create a random generator."""
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in double precision."""
    return torch.randn(shape, generator=generator, dtype=REAL)


def square(vector: Tensor) -> float:
    """Compute the squared norm."""
    return float((vector**2).sum())


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply matrices by vectors, over any leading axes."""
    return (matrix @ vector[..., None]).squeeze(-1)


class Quadratics:
    """``F_k(w) = (w - c_k)' A_k (w - c_k) / 2``, with ``A_k`` ``[..., clients, d, d]``.

    A leading axis holds many problems.
    """

    def __init__(self, curvature: Tensor, centre: Tensor, share: Tensor) -> None:
        self.curvature, self.centre, self.share = curvature, centre, share
        self.dims = centre.shape[-1]
        self.mean_curvature = (share[..., None, None] * curvature).sum(-3)
        pull = times(curvature, centre)
        self._pull = pull[..., None, :]
        mean_pull = (share[..., None] * pull).sum(-2)
        self.optimum: Tensor = torch.linalg.solve(self.mean_curvature, mean_pull)
        eigenvalues: Tensor = torch.linalg.eigvalsh(curvature)
        self.smoothness = eigenvalues.amax((-1, -2))  # L, the largest over clients
        self.convexity = eigenvalues.amin((-1, -2))  # mu, the smallest over clients
        # Gamma = F* - sum_k p_k F_k*; every F_k* is zero here.
        self.heterogeneity = self.value(self.optimum)
        # The normal of the hyperplane, as a constraint matrix of one row.
        self.ones = torch.ones(1, self.dims, dtype=REAL)

    def gradients(self, models: Tensor, noise: Tensor | None = None) -> Tensor:
        """Compute ``A_k (w_k - c_k)`` plus noise, at models ``[..., clients, repetitions, d]``."""
        constant = -self._pull if noise is None else noise - self._pull
        if models.ndim == 3:
            return torch.baddbmm(constant, models, self.curvature)
        return constant + models @ self.curvature

    def value(self, model: Tensor) -> Tensor:
        off = model[..., None, :] - self.centre
        losses = 0.5 * (off * times(self.curvature, off)).sum(-1)
        return (self.share * losses).sum(-1)

    def gap(self, model: Tensor) -> Tensor:
        """Compute ``F(w) - F*``."""
        off = model - self.optimum
        return 0.5 * (off * times(self.mean_curvature, off)).sum(-1)

    def constrained_optimum(self, start: Tensor, constraints: Tensor | None = None) -> Tensor:
        """Minimise ``F`` under ``B w = B start`` (Lagrange); ``B`` is one row of ones."""
        rows = self.ones if constraints is None else constraints
        spread = rows.mT.expand(*start.shape[:-1], -1, -1)
        lifted: Tensor = torch.linalg.solve(self.mean_curvature, spread)
        inner = torch.linalg.solve(rows @ lifted, times(rows, start - self.optimum))
        return self.optimum + times(lifted, inner)

    def constrained_gap(self, start: Tensor, constraints: Tensor | None = None) -> Tensor:
        """Compute ``F(w_c) - F* = s' (B A^-1 B')^-1 s / 2`` with ``s = B (start - w*)``."""
        rows = self.ones if constraints is None else constraints
        off = times(rows, start - self.optimum)
        schur = rows @ torch.linalg.solve(self.mean_curvature, rows.mT)
        inner: Tensor = torch.linalg.solve(schur, off)
        return 0.5 * (off * inner).sum(-1)

    def restricted(self, origin: Tensor, basis: Tensor) -> "Quadratics":
        """Express the clients in ``z`` with ``w = origin + U z``, without additive constants."""
        curvature = basis.mT @ self.curvature @ basis
        pull = times(basis.mT @ self.curvature, self.centre - origin)
        return Quadratics(curvature, torch.linalg.solve(curvature, pull), self.share)

    @classmethod
    def draw(
        cls, generator: torch.Generator, *shape: int, dims: int = 12,
        eigenvalues: tuple[float, float] = (1.0, 4.0), spread: float = 1.0,
    ) -> "Quadratics":  # fmt: skip
        """Draw ``[..., clients]`` (8) with these extreme eigenvalues, and 10 to 30 examples."""
        low, high = eigenvalues
        shape = shape or (8,)
        rotation, _ = torch.linalg.qr(normal(generator, *shape, dims, dims))
        values = low + (high - low) * torch.rand(*shape, dims, generator=generator, dtype=REAL)
        values[..., 0], values[..., -1] = low, high
        curvature = rotation * values[..., None, :] @ rotation.mT
        counts = torch.randint(10, 31, shape, generator=generator).to(REAL)
        centre = spread * normal(generator, *shape, dims)
        return cls(0.5 * (curvature + curvature.mT), centre, counts / counts.sum(-1, True))


class Logistic:
    """Mean logistic losses plus ``l2 |w|^2 / 2``; ``signed``: features times labels -1 or 1."""

    def __init__(self, signed: Tensor) -> None:
        self.signed, self.l2 = signed, 0.05
        self.share = torch.full((len(signed),), 1.0 / len(signed), dtype=REAL)
        self.dims = signed.shape[-1]
        gram = signed.mT @ signed / signed.shape[-2]
        self.smoothness = 0.25 * float(torch.linalg.eigvalsh(gram).max()) + self.l2

    def value(self, model: Tensor) -> Tensor:
        return softplus(-self.signed @ model).mean() + 0.5 * self.l2 * (model @ model)

    def gradients(self, models: Tensor, noise: Tensor | None = None) -> Tensor:
        """Compute every client's gradients at its own models."""
        pull = torch.sigmoid(-models @ self.signed.mT) @ self.signed
        found = self.l2 * models - pull / self.signed.shape[-2]
        return found if noise is None else found + noise

    def hessian(self, model: Tensor) -> Tensor:
        rows = self.signed.flatten(0, 1)
        chance = torch.sigmoid(rows @ model)
        weighted = rows * (chance * (1.0 - chance))[:, None]
        return rows.mT @ weighted / len(rows) + self.l2 * eye(self.dims)

    def optimum(self, origin: Tensor, basis: Tensor) -> Tensor:
        """Minimise on ``origin + span(basis)`` by Newton's method."""
        model = origin
        for _ in range(50):
            whole = self.gradients(model.expand(len(self.share), 1, -1))[:, 0]
            gradient = basis.mT @ (self.share @ whole)
            step = torch.linalg.solve(basis.mT @ self.hessian(model) @ basis, gradient)
            model = model - basis @ step
        return model

    @classmethod
    def draw(cls, generator: torch.Generator, *, bias: bool = False) -> "Logistic":
        """Draw 6 clients that differ in the mean of 8 features and in their true weights."""
        features = normal(generator, 6, 40, 8) + 0.5 * normal(generator, 6, 1, 1)
        truth = 0.4 + normal(generator, 8) + 0.5 * normal(generator, 6, 1, 8)
        labels = torch.sign((features * truth).sum(-1) + normal(generator, 6, 40))[..., None]
        return cls(labels * pad(features, (0, int(bias)), value=1.0))
