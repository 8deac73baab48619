"""Local gradient steps between averagings, for many repetitions side by side.

The step is the paper's: ``w_k <- w_k (1 - decay n_t) - n_t v``, where ``v`` is the projected
gradient or its momentum. Models have the shape ``[clients, repetitions, d]``, with a leading axis
for many problems. Each method has its own models.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedzmg.theory.problems import REAL, Logistic, Quadratics, eye, normal, seeded
from fedzmg.wrappers import projection

Projection: TypeAlias = Callable[[Tensor], Tensor]
Noise: TypeAlias = Callable[[], Tensor]
LOCAL_STEPS, DEVIATION = 5, 0.5


def zero_mean(gradients: Tensor) -> Tensor:
    """Apply the package's projection: one mean per vector."""
    return projection.zero_mean(gradients, (-1,))


def identity(gradients: Tensor) -> Tensor:
    """Return gradients unprojected, as FedAvg's clients do."""
    return gradients


def hyperplane_basis(dims: int) -> Tensor:
    """Return an orthonormal basis, as columns, of the vectors whose entries sum to zero."""
    whole = eye(dims)
    whole[:, 0] = 1.0
    basis: Tensor = torch.linalg.qr(whole)[0]
    return basis[:, 1:]


@dataclass(frozen=True)
class Schedule:
    """Step sizes ``n_t = beta / (t + gamma)``."""

    beta: float
    gamma: float

    def __call__(self, t: int) -> float:
        return self.beta / (t + self.gamma)


def theorems_schedule(problem: Quadratics) -> Schedule:
    """Return ``beta = 2 / mu``, ``gamma = max(8 L / mu, E + 1)``, hence ``n_0 <= 1 / (4 L)``."""
    smooth, convex = float(problem.smoothness.max()), float(problem.convexity.min())
    return Schedule(2.0 / convex, max(8.0 * smooth / convex, LOCAL_STEPS + 1.0))


def setup(
    seed: int, offset: float = 0.5, *shape: int, zero_sum: bool = False
) -> tuple[torch.Generator, Quadratics, Tensor, Schedule]:
    """Draw problems and starts at ``w* + normal + offset``, with the theorem's schedule."""
    generator = seeded(seed)
    problem = Quadratics.draw(generator, *shape)
    away = normal(generator, *shape[:-1], problem.dims)
    start = problem.optimum + (zero_mean(away) if zero_sum else away) + offset
    return generator, problem, start, theorems_schedule(problem)


def marks(steps: int) -> list[int]:
    """Choose ends of rounds to measure at, evenly spaced on a logarithmic axis."""
    rounds = steps // LOCAL_STEPS
    return sorted({LOCAL_STEPS * round(rounds ** (i / 59)) for i in range(60)})


class State(NamedTuple):
    """Models after a step, one entry per method."""

    step: int  # number of steps so far
    before: tuple[Tensor, ...]  # clients' models before the step
    after: tuple[Tensor, ...]
    server: tuple[Tensor, ...]  # [repetitions, d], after the averaging that may follow the step


def isotropic(seed: int, *shape: int) -> Noise:
    """Return a source of normal noise ``[clients, repetitions, d]``, the same for all methods."""
    # NumPy draws three times as fast as torch. Every draw overwrites the last.
    source = np.random.Generator(np.random.SFC64(seed))
    buffer = np.empty(shape)

    def draw() -> Tensor:
        source.standard_normal(out=buffer)
        return torch.from_numpy(buffer).mul_(DEVIATION)

    return draw


def descend(
    problem: Quadratics | Logistic, start: Tensor, rate: Callable[[int], float], *, steps: int,
    projections: Sequence[Projection] = (), local_steps: int = LOCAL_STEPS, repetitions: int = 1,
    noise: Noise | None = None, decay: float = 0.0, momentum: float = 0.0, server_rate: float = 1.0,
    cohort: Callable[[], Tensor] | None = None,
) -> Iterator[State]:  # fmt: skip
    """Run local steps, averaging models every ``local_steps``.

    There is a method per projection, all with the same noise; zero mean by default. ``rate`` is the
    step size of step ``t``, counted from 0. Repetitions are runs side by side with their own noise
    ``[clients, repetitions, d]`` and cohorts: weights ``[clients, repetitions]`` of a round, all
    clients by default. Momentum accumulates and is zero at the start of each round.
    """
    projections = projections or (zero_mean,)
    *many, clients = problem.share.shape
    shape = (*many, clients, repetitions, problem.dims)
    server = [start[..., None, None, :].expand(*many, 1, *shape[-2:])] * len(projections)
    models = [one.expand(shape) for one in server]
    for t in range(steps):
        n = rate(t)
        if t % local_steps == 0:
            weights = (problem.share[..., None] if cohort is None else cohort())[..., None]
            velocity = [torch.zeros((), dtype=REAL)] * len(projections)
        drawn = None if noise is None else noise()
        before = tuple(models)
        for i, project in enumerate(projections):
            step = project(problem.gradients(models[i], drawn))
            if momentum:
                step = velocity[i] = momentum * velocity[i] + step
            kept = models[i] * (1.0 - decay * n) if decay else models[i]
            models[i] = torch.sub(kept, step, alpha=n)
        after = tuple(models)
        if (t + 1) % local_steps == 0:
            for i, one in enumerate(after):
                mean = (weights * one).sum(-3, keepdim=True)
                server[i] = mean if server_rate == 1.0 else torch.lerp(server[i], mean, server_rate)
                models[i] = server[i].expand(shape)
        yield State(t + 1, before, after, tuple(one.squeeze(-3) for one in server))


def final_state(*args: Any, **options: Any) -> State:
    """Return the state after the last step of :func:`descend`."""
    return deque(descend(*args, **options), maxlen=1).pop()


def expected_distances(
    problem: Quadratics, start: Tensor, rate: Callable[[int], float], *, steps: int,
    projections: Sequence[Projection], deviation: float = DEVIATION,
) -> dict[int, list[float]]:  # fmt: skip
    """Compute ``E |wbar_t - w*|^2`` after every round exactly, for each projection."""
    # Steps are linear in the model and in the noise: mean and covariance obey a recursion.
    clients, dims = problem.centre.shape
    phi = torch.stack([project(eye(dims)) for project in projections])[:, None]
    centred = phi @ problem.curvature
    share = problem.share[:, None, None]
    mean = start.expand(len(projections), dims)
    covariance = torch.zeros(len(projections), dims, dims, dtype=REAL)
    found = {}
    for first in range(0, steps, LOCAL_STEPS):
        means = mean[:, None, :, None].expand(-1, clients, -1, -1)
        carried = eye(dims)
        own = torch.zeros(len(projections), clients, dims, dims, dtype=REAL)
        for t in range(first, first + LOCAL_STEPS):
            n = rate(t)
            step = eye(dims) - n * centred
            means = means - n * (centred @ (means - problem.centre[..., None]))
            carried = step @ carried
            own = step @ own @ step.mT + (n * deviation) ** 2 * phi
        moved = (share * carried).sum(1)
        covariance = moved @ covariance @ moved.mT + (share**2 * own).sum(1)
        mean = (share * means).sum(1).squeeze(-1)
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        found[first + LOCAL_STEPS] = (((mean - problem.optimum) ** 2).sum(-1) + spread).tolist()
    return found


def asymptotic_constant(problem: Quadratics, rate: Schedule, basis: Tensor) -> float:
    """Compute the limit of ``t E |wbar_t - limit|^2`` in the span of ``basis``.

    With small steps the mean model follows ``x <- x - n_t (A x + noise)``. Its covariance
    ``V / t`` solves ``(beta A - 1/2) V + V (beta A - 1/2) = beta^2 S``. Drift within a round adds
    terms of the order ``1/t^2``.
    """
    values = torch.linalg.eigvalsh(basis.mT @ problem.mean_curvature @ basis)
    noise = DEVIATION**2 * float((problem.share**2).sum())
    return float((rate.beta**2 * noise / (2.0 * rate.beta * values - 1.0)).sum())
