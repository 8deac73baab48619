"""E1 to E6: conserved quantities and limits beyond the paper's analysis."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from fedzmg.algorithms import projection
from fedzmg.theory import descent
from fedzmg.theory.convergence import marks
from fedzmg.theory.descent import LOCAL_STEPS, Schedule, final_model, setup
from fedzmg.theory.finding import Finding, Size, Value
from fedzmg.theory.problems import (
    REAL,
    Quadratics,
    hyperplane_basis,
    normal,
    quadratics,
    seeded,
    square,
)

CLIENTS = "8 clients, d = 12, eigenvalues 1 to 4, E = 5"


def restriction(size: Size) -> Finding:
    """E1: FedZMG equals FedAvg in coordinates of the hyperplane, step by step."""
    generator, problem, start, rate = setup(101, 0.0)
    basis = hyperplane_basis(problem.dims)
    inside = problem.restricted(start, basis)
    steps, repetitions = 500, 20
    shape = (len(problem.share), repetitions, problem.dims)
    noise, same_noise = descent.isotropic(101, *shape), descent.isotropic(101, *shape)
    worst = 0.0
    for outer, inner in zip(
        descent.descend(problem, start, rate, steps=steps, noise=noise, repetitions=repetitions),
        descent.descend(
            inside, torch.zeros(problem.dims - 1, dtype=REAL), rate, steps=steps,
            repetitions=repetitions, projections=(descent.identity,),
            noise=lambda: same_noise() @ basis,
        ),
        strict=True,
    ):  # fmt: skip
        worst = max(worst, float((outer.after[0] - start - inner.after[0] @ basis.mT).abs().max()))
    many = quadratics(generator, problems=(size.problems,))
    origin = many.optimum + normal(generator, size.problems, problem.dims)
    smaller = many.restricted(origin[:, None, :], basis)
    off = start + basis @ inside.optimum - problem.constrained_optimum(start)
    return Finding(
        "E1",
        "FedZMG is FedAvg on the hyperplane through the start",
        "with w = w_0 + U z, U a basis of zero-sum vectors, both make the same steps; every result "
        "on FedAvg carries over with constants of the restricted problem",
        f"{CLIENTS}, noise 0.5, {steps} steps; constants on {size.problems} problems",
        (
            Value("distance of any two models, largest", 0.0, worst, 1e-11),
            Value("restricted L / L, largest", 1.0,
                  float((smaller.smoothness / many.smoothness).max()), 1e-9, "at most"),
            Value("restricted mu / mu, smallest", 1.0,
                  float((smaller.convexity / many.convexity).min()), 1e-9, "at least"),
            Value("optimum of the restricted problem, off w_c", 0.0, float(off.abs().max()), 1e-11),
        ),
    )  # fmt: skip


def per_column(size: Size) -> Finding:
    """E2: a projection per output unit conserves one sum each; biases stay free."""
    _, problem, start, rate = setup(102)
    steps = min(size.steps, 6000)
    # A kernel of three units with three inputs each, then three biases.
    columns = torch.zeros(3, problem.dims, dtype=REAL)
    for unit in range(3):
        columns[unit, 3 * unit : 3 * unit + 3] = 1.0

    def centred(gradients: Tensor) -> Tensor:
        kernel, biases = gradients[..., :9], gradients[..., 9:]
        units = projection.zero_mean(kernel.reshape(*kernel.shape[:-1], 3, 3), (-1,))
        return torch.cat([units.flatten(-2), biases], -1)

    lines = []
    for name, project, rows in (
        ("whole vector", descent.zero_mean, problem.ones), ("per column", centred, columns),
    ):  # fmt: skip
        end = final_model(problem, start, rate, steps, project)
        limit = problem.constrained_optimum(start, rows)
        lines += [
            Value(f"{name}: drift of {len(rows)} sum(s), largest", 0.0,
                  float((rows @ (end - start)).abs().max()), 1e-11),
            Value(f"{name}: |w_T - w_c|^2", 0.0, square(end - limit), _tolerance(steps)),
            Value(f"{name}: F(w_T) - F* = s'(B A^-1 B')^-1 s / 2",
                  float(problem.constrained_gap(start, rows)), float(problem.gap(end)), 0.01,
                  "relative"),
        ]  # fmt: skip
    return Finding(
        "E2",
        "Projection per column instead of one for all",
        "conserved is one sum per output unit, B w = B w_0; the limit minimises F under that",
        f"{CLIENTS}, as a 3 x 3 kernel and 3 free biases, {steps:,} steps",
        tuple(lines),
    )


def momentum(size: Size) -> Finding:
    """E3: momentum changes neither the conserved sum nor the limit."""
    beta = 0.9
    generator, problem, start, usual = setup(103)
    # Momentum 0.9 makes steps ten times as long: start further down the schedule.
    rate = Schedule(usual.beta, 2.0 * usual.gamma)
    steps = min(size.steps, 6000)
    end = final_model(problem, start, rate, steps, momentum=beta)
    limit = problem.constrained_optimum(start)
    first, late = (torch.zeros(problem.dims, dtype=REAL) for _ in range(2))
    for gradient in normal(generator, 6, problem.dims):
        first = beta * first + descent.zero_mean(gradient)
        late = beta * late + gradient
    return Finding(
        "E3",
        "Momentum",
        "momentum of projected gradients keeps the sum and leads to the same limit",
        f"{CLIENTS}, momentum {beta}, restarted every round, {steps:,} steps",
        (
            Value("drift of 1'w_t", 0.0, abs(float((end - start).sum())), 1e-11),
            Value("|w_T - w_c|^2", 0.0, square(end - limit), _tolerance(steps)),
            Value("|w_T - w*|^2 = |w_c - w*|^2", square(limit - problem.optimum),
                  square(end - problem.optimum), 0.01, "relative"),
            Value("projecting the buffer instead: difference", 0.0,
                  float((descent.zero_mean(late) - first).abs().max()), 1e-12),
        ),
    )  # fmt: skip


def participation(size: Size) -> Finding:
    """E4: a cohort of three with renormalised weights shifts the limit."""
    count = 3
    generator, problem, start, rate = setup(104)
    repetitions, steps = max(20, size.repetitions // 4), min(size.steps, 3000)
    even = torch.full_like(problem.share, 1 / 8)
    uneven = torch.full_like(problem.share, 0.5 / 7)
    uneven[0] = 0.5
    lines = []
    for name, share in (("equal clients", even), ("one holds half", uneven)):
        chosen = Quadratics(problem.curvature, problem.centre, share)
        *_, state = descent.descend(
            chosen, start, rate, steps=steps, repetitions=repetitions,
            cohort=_cohorts(share, count, repetitions, generator),
        )  # fmt: skip
        final = state.server[0]
        effective = Quadratics(chosen.curvature, chosen.centre, _mean_weights(share, count))
        limit, whole = (one.constrained_optimum(start) for one in (effective, chosen))
        error = final.var(0).sum() / repetitions
        lines += [
            Value(f"{name}: drift of 1'w_t, largest", 0.0,
                  float((final.sum(-1) - start.sum()).abs().max()), 1e-10),
            Value(f"{name}: |mean w_T - w_c|^2, in squared standard errors", 0.0,
                  float(((final.mean(0) - whole) ** 2).sum() / error), 6.0, stated=True),
            Value(f"{name}: |mean w_T - limit for E[weights]|^2, the same", 0.0,
                  float(((final.mean(0) - limit) ** 2).sum() / error), 6.0),
        ]  # fmt: skip
    return Finding(
        "E4",
        "Partial participation",
        "with renormalised weights the limit is that of full participation",
        f"{CLIENTS}, 3 clients a round, {repetitions} repetitions, {steps:,} steps",
        tuple(lines),
        "for clients of equal size; otherwise the limit is that of the weights a client has on "
        "average over cohorts",
    )


def _cohorts(
    share: Tensor, count: int, repetitions: int, generator: torch.Generator
) -> Callable[[], Tensor]:
    """Return a function that draws the renormalised weights of a round; others get zero."""

    def draw() -> Tensor:
        order = torch.rand(len(share), repetitions, generator=generator, dtype=REAL).argsort(0)
        taken = (order.argsort(0) < count) * share[:, None]
        return taken / taken.sum(0)

    return draw


def _mean_weights(share: Tensor, count: int) -> Tensor:
    """Average every client's weight over all cohorts."""
    cohorts = list(itertools.combinations(range(len(share)), count))
    total = torch.zeros_like(share)
    for cohort in cohorts:
        members = list(cohort)
        total[members] += share[members] / share[members].sum()
    return total / len(cohorts)


def server_rate(size: Size) -> Finding:
    """E5: the server's learning rate does not change the limit."""
    _, problem, start, rate = setup(105)
    limit = problem.constrained_optimum(start)
    steps = min(size.steps, 6000)
    constant, long = 0.05, max(800, min(size.steps, 3000))
    fixed = _fixed_point(problem, start, constant)
    lines = []
    for moved in (0.5, 1.5):
        end = final_model(problem, start, rate, steps, server_rate=moved)
        stuck = final_model(problem, start, lambda _: constant, long, server_rate=moved)
        lines += [
            Value(f"eta_s = {moved}: drift of 1'w_t", 0.0, abs(float((end - start).sum())), 1e-11),
            Value(f"eta_s = {moved}: |w_T - w_c|^2", 0.0, square(end - limit), _tolerance(steps)),
            Value(f"eta_s = {moved}, constant steps: |w_T - fixed point|", 0.0,
                  float((stuck - fixed).norm()), 1e-9),
        ]  # fmt: skip
    halved = square(_fixed_point(problem, start, constant / 2) - limit)
    lines.append(
        Value("constant steps: |fixed point - w_c|^2, halving n", 0.25,
              halved / square(fixed - limit), 0.05)
    )  # fmt: skip
    return Finding(
        "E5",
        "Server learning rate",
        "eta_s changes neither the sum nor the limit; with constant steps the limit is a fixed "
        "point of the round, off w_c by the order of n",
        f"{CLIENTS}, {steps:,} steps n_t, or {long:,} of {constant}",
        tuple(lines),
    )


def _fixed_point(problem: Quadratics, start: Tensor, n: float) -> Tensor:
    """Solve for the fixed point of a round of constant steps on the hyperplane."""
    basis = hyperplane_basis(problem.dims)
    inside = problem.restricted(start, basis)
    identity = torch.eye(problem.dims - 1, dtype=REAL)
    left = identity - torch.linalg.matrix_power(identity - n * inside.curvature, LOCAL_STEPS)
    weighted = inside.share[:, None, None] * left
    pull = (weighted @ inside.centre[..., None]).sum(0).squeeze(-1)
    inner: Tensor = torch.linalg.solve(weighted.sum(0), pull)
    return start + basis @ inner


def decay_limit(size: Size) -> Finding:
    """E6: decay forgets the start; the limit is a ridge solution of zero sum."""
    generator, decay = seeded(106), 0.5
    problem = quadratics(generator)
    rate = descent.theorems_schedule(problem)
    steps = min(size.steps, 8000)
    curvature = problem.curvature + decay * torch.eye(problem.dims, dtype=REAL)
    pull = problem.curvature @ problem.centre[..., None]
    ridge = Quadratics(curvature, torch.linalg.solve(curvature, pull).squeeze(-1), problem.share)
    limit = ridge.constrained_optimum(torch.zeros(problem.dims, dtype=REAL))
    product = 1.0
    for step in range(steps):
        product *= 1.0 - decay * rate(step)
    lines, series, watched = [], {}, set(marks(steps))
    for name, offset in (("sum +12", 1.0), ("sum -24", -2.0)):
        start = descent.zero_mean(normal(generator, problem.dims)) + offset
        sums = {}
        for state in descent.descend(problem, start, rate, steps=steps, decay=decay):
            if state.step in watched:
                sums[float(state.step)] = abs(float(state.server[0].sum()))
        end = state.server[0][0]
        left = float(start.sum()) * product
        # The sum decays like t^-(lambda beta); its remainder acts as a constraint.
        there = ridge.constrained_optimum(limit + left / problem.dims)
        lines += [
            Value(f"{name}: 1'w_T", left, float(end.sum()), 1e-11),
            Value(f"{name}: |w_T - ridge minimiser with that sum|^2", 0.0, square(end - there),
                  _tolerance(steps)),
            Value(f"{name}: |w_T - limit|^2", 0.0, square(end - limit),
                  2.0 * left**2 / problem.dims + _tolerance(steps)),
        ]  # fmt: skip
        series[name] = (list(sums), list(sums.values()))
    return Finding(
        "E6",
        "Where weight decay leads",
        "the limit minimises F + lambda |w|^2 / 2 among vectors of zero sum, whatever the start",
        f"{CLIENTS}, lambda = {decay}, {steps:,} steps, two starts",
        tuple(lines),
        series=series,
    )


def _tolerance(steps: int) -> float:
    """Bound the shift of the limit by drift within a round: a multiple of the last step size."""
    return (60.0 / steps) ** 2
