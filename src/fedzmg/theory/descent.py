"""Local gradient steps between averagings, for many repetitions side by side.

The step is the paper's: ``w_k <- w_k (1 - decay n_t) - n_t v``, where ``v`` is the projected
gradient or its momentum. Models have the shape ``[clients, repetitions, d]``, after an axis of many
problems where there is one; each method has models of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedzmg.algorithms import projection
from fedzmg.theory.problems import REAL, Quadratics

Projection: TypeAlias = Callable[[Tensor], Tensor]
Noise: TypeAlias = Callable[[], Tensor]


def zero_mean(gradients: Tensor) -> Tensor:
    """The package's projection, over the last axis: one mean for the whole vector."""
    return projection.zero_mean(gradients, (-1,))


def as_it_is(gradients: Tensor) -> Tensor:
    """FedAvg's clients: no projection."""
    return gradients


@dataclass(frozen=True)
class Schedule:
    """Step sizes ``n_t = beta / (t + gamma)``."""

    beta: float
    gamma: float

    def __call__(self, t: int) -> float:
        return self.beta / (t + self.gamma)


def theorems_schedule(problem: Quadratics, local_steps: int) -> Schedule:
    """``beta = 2 / mu`` and ``gamma = max(8 L / mu, E + 1)``, so that ``n_0 <= 1 / (4 L)``."""
    smooth, convex = float(problem.smoothness.max()), float(problem.convexity.min())
    return Schedule(2.0 / convex, max(8.0 * smooth / convex, local_steps + 1.0))


class State(NamedTuple):
    """Where the clients are after a step, and the server after an averaging that may follow.

    One entry per method.
    """

    step: int
    """Steps done."""
    before: tuple[Tensor, ...]
    """The clients' models from which the step was made."""
    after: tuple[Tensor, ...]
    server: tuple[Tensor, ...]
    """The server's model, ``[repetitions, d]``, after an averaging that follows."""


def isotropic(seed: int, *shape: int, deviation: float = 0.5) -> Noise:
    """Normal noise of shape ``[clients, repetitions, d]``, the same for all methods.

    NumPy draws normal numbers three times as fast as torch, and most of the time goes there. What
    is given is overwritten by the next draw.
    """
    source = np.random.Generator(np.random.SFC64(seed))
    room = np.empty(shape)
    drawn = torch.from_numpy(room)

    def draw() -> Tensor:
        source.standard_normal(out=room)
        return drawn.mul_(deviation)

    return draw


def descend(
    problem: Quadratics,
    start: Tensor,
    rate: Callable[[int], float],
    *,
    steps: int,
    projections: Sequence[Projection] = (),
    local_steps: int = 5,
    repetitions: int = 1,
    noise: Noise | None = None,
    decay: float = 0.0,
    momentum: float = 0.0,
    server_rate: float = 1.0,
    cohort: Callable[[], Tensor] | None = None,
) -> Iterator[State]:
    """Run local steps; every ``local_steps`` the models are averaged.

    Args:
        problem: what is minimised; it may be many problems.
        start: ``[d]``, after an axis of problems where there are many.
        rate: step size of step ``t``, counted from 0.
        steps: how many.
        projections: one for each method, which see the same noise; zero mean unless given.
        local_steps: between averagings.
        repetitions: side by side; they differ by their noise and their cohorts.
        noise: draws ``[clients, repetitions, d]``, once a step.
        decay: decoupled weight decay.
        momentum: accumulating, zero at the start of each round.
        server_rate: how far the server moves to the mean.
        cohort: draws the weights ``[clients, repetitions]`` of a round; everybody unless given.
    """
    projections = projections or (zero_mean,)
    *many, clients, dims = problem.centre.shape
    shape = (*many, clients, repetitions, dims)
    server = [start[..., None, None, :].expand(*many, 1, repetitions, dims)] * len(projections)
    models = [one.expand(shape) for one in server]
    velocity = [torch.zeros((), dtype=REAL)] * len(projections)
    pull = (problem.curvature @ problem.centre[..., None]).mT
    for t in range(steps):
        n = rate(t)
        if t % local_steps == 0:
            weights = (problem.share[..., None] if cohort is None else cohort())[..., None]
            velocity = [torch.zeros((), dtype=REAL)] * len(projections)
        # What does not depend on the model is the same for all methods.
        constant = -pull if noise is None else noise().sub_(pull)
        before = tuple(models)
        for i, project in enumerate(projections):
            step = project(_affine(constant, models[i], problem.curvature))
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


def _affine(constant: Tensor, models: Tensor, matrices: Tensor) -> Tensor:
    """``constant + models @ matrices``, in one operation where there is one problem."""
    if models.ndim == 3:
        return torch.baddbmm(constant, models, matrices)
    return constant + models @ matrices


def averages(problem: Quadratics, state: State) -> list[Tensor]:
    """The mean model after a step, ``[repetitions, d]`` for each method."""
    return [(problem.share[..., None, None] * one).sum(-3) for one in state.after]


def expected_distances(
    problem: Quadratics,
    start: Tensor,
    target: Tensor,
    rate: Callable[[int], float],
    *,
    steps: int,
    projections: Sequence[Projection],
    local_steps: int = 5,
    deviation: float = 0.5,
) -> dict[int, list[float]]:
    """``E |wbar_t - target|^2`` after every round, exactly: one number for each projection.

    Steps are linear in the model and in the noise, so mean and covariance obey a recursion of
    their own; nothing is drawn at random.
    """
    clients, dims = problem.centre.shape
    identity = torch.eye(dims, dtype=REAL)
    phi = torch.stack([project(identity) for project in projections])[:, None]
    centred = phi @ problem.curvature
    share = problem.share[:, None, None]
    mean = start.expand(len(projections), dims)
    covariance = torch.zeros(len(projections), dims, dims, dtype=REAL)
    found = {}
    for first in range(0, steps, local_steps):
        means = mean[:, None, :, None].expand(-1, clients, -1, -1)
        carried = identity
        own = torch.zeros(len(projections), clients, dims, dims, dtype=REAL)
        for t in range(first, first + local_steps):
            n = rate(t)
            step = identity - n * centred
            means = means - n * (centred @ (means - problem.centre[..., None]))
            carried = step @ carried
            own = step @ own @ step.mT + (n * deviation) ** 2 * phi
        moved = (share * carried).sum(1)
        covariance = moved @ covariance @ moved.mT + (share**2 * own).sum(1)
        mean = (share * means).sum(1).squeeze(-1)
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        found[first + local_steps] = (((mean - target) ** 2).sum(-1) + spread).tolist()
    return found


def asymptotic_constant(
    problem: Quadratics, rate: Schedule, basis: Tensor, deviation: float = 0.5
) -> float:
    """The limit of ``t E |wbar_t - limit|^2`` in the span of ``basis``, in closed form.

    Once steps are small the mean model follows ``x <- x - n_t (A x + noise)``, whose covariance
    ``V / t`` solves ``(beta A - 1/2) V + V (beta A - 1/2) = beta^2 S``. Drift within a round adds
    only terms of the order ``1/t^2``.
    """
    values = torch.linalg.eigvalsh(basis.mT @ problem.mean_curvature @ basis)
    noise = deviation**2 * float((problem.share**2).sum())
    return float((rate.beta**2 * noise / (2.0 * rate.beta * values - 1.0)).sum())
