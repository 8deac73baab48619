"""E1 to E6, E11: conserved quantities, limits and step sizes beyond the paper's analysis."""

import math
from functools import partial

import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.convergence import slope
from fedzmg.theory.descent import LOCAL_STEPS, Schedule, final_state, setup
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, Quadratics, eye, normal, seeded, square, times

CLIENTS = "8 clients, d = 12, eigenvalues 1 to 4, E = 5"


@check("E1", "FedZMG is FedAvg on the hyperplane through the start")
def _restriction(_size: Size, found: Finding) -> None:
    """With w = w_0 + U z, U a basis of zero-sum vectors, both make the same steps.

    Every result on FedAvg carries over with constants of the restricted problem.
    """
    steps, repetitions = 500, 20
    found.setting = f"{CLIENTS}, noise 0.5, {steps} steps"
    _, problem, start, rate = setup(101, 0.0)
    basis = descent.hyperplane_basis(problem.dims)
    inside = problem.restricted(start, basis)
    shape = (len(problem.share), repetitions, problem.dims)
    noise, same_noise = descent.isotropic(101, *shape), descent.isotropic(101, *shape)
    worst = torch.zeros(())
    free = descent.descend(problem, start, rate, steps=steps, noise=noise, repetitions=repetitions)
    bound = descent.descend(
        inside, torch.zeros(problem.dims - 1, dtype=REAL), rate, projections=(descent.identity,),
        steps=steps, repetitions=repetitions, noise=lambda: same_noise() @ basis,
    )  # fmt: skip
    for outer, inner in zip(free, bound, strict=True):
        apart = outer.after[0] - start - inner.after[0] @ basis.mT
        worst = torch.maximum(worst, apart.abs().max())
    off = start + basis @ inside.optimum - problem.constrained_optimum(start)
    found.zero("distance of any two models, largest", worst, 1e-11)
    found.zero("optimum of the restricted problem, off w_c", off, 1e-11)


def _tolerance(steps: int) -> float:
    """Bound the shift of the limit by drift within a round: a multiple of the last step size."""
    return (60.0 / steps) ** 2


@check("E2", "Projection per column instead of one for all")
def _per_column(size: Size, found: Finding) -> None:
    """One sum per output unit is conserved, B w = B w_0; the limit minimises F under that."""
    steps = min(size.steps, 5000)
    found.setting = f"{CLIENTS}, as a 3 x 3 kernel and 3 free biases, {steps:,} steps"
    _, problem, start, rate = setup(102)
    # A kernel of three units with three inputs each, then three biases.
    columns = torch.zeros(3, problem.dims, dtype=REAL)
    columns[:, :9] = torch.kron(eye(3), torch.ones(1, 3, dtype=REAL))

    def centred(gradients: Tensor) -> Tensor:
        kernel, biases = gradients.tensor_split([9], -1)
        units = descent.zero_mean(kernel.reshape(*kernel.shape[:-1], 3, 3))
        return torch.cat([units.flatten(-2), biases], -1)

    end = final_state(problem, start, rate, steps=steps, projections=(centred,)).server[0][0]
    off, gap = end - problem.constrained_optimum(start, columns), problem.gap(end)
    found.zero("drift of three sums, largest", columns @ (end - start), 1e-11)
    found.zero("|w_T - w_c|^2", square(off), _tolerance(steps))
    found.add("F(w_T) - F* = s'(B A^-1 B')^-1 s / 2",
              float(problem.constrained_gap(start, columns)), gap, 0.01, "relative")  # fmt: skip


@check("E3", "Momentum")
def _momentum(size: Size, found: Finding) -> None:
    """Momentum of projected gradients keeps the sum and leads to the same limit."""
    beta, steps = 0.9, min(size.steps, 5000)
    found.setting = f"{CLIENTS}, momentum {beta}, restarted every round, {steps:,} steps"
    generator, problem, start, usual = setup(103)
    # Momentum 0.9 makes steps ten times as long: start further down the schedule.
    rate = Schedule(usual.beta, 2.0 * usual.gamma)
    end = final_state(problem, start, rate, steps=steps, momentum=beta).server[0][0]
    limit = problem.constrained_optimum(start)
    first = late = torch.zeros(problem.dims, dtype=REAL)
    for gradient in normal(generator, 6, problem.dims):
        first = beta * first + descent.zero_mean(gradient)
        late = beta * late + gradient
    found.zero("drift of 1'w_t", (end - start).sum(), 1e-11)
    found.zero("|w_T - w_c|^2", square(end - limit), _tolerance(steps))
    found.add("|w_T - w*|^2 = |w_c - w*|^2", square(limit - problem.optimum),
              square(end - problem.optimum), 0.01, "relative")  # fmt: skip
    found.zero("projecting the buffer instead: difference", descent.zero_mean(late) - first, 1e-12)


@check("E4", "Partial participation")
def _participation(size: Size, found: Finding) -> None:
    """With renormalised weights the limit is that of full participation."""
    average = "the weights a client has on average over cohorts"
    found.remedy = f"for clients of equal size; otherwise the limit is that of {average}"
    count, repetitions, steps = 3, max(20, size.repetitions // 4), min(size.steps, 3000)
    found.setting = f"{CLIENTS}, 3 clients a round, {repetitions} repetitions, {steps:,} steps"
    generator, problem, start, rate = setup(104)
    uneven = torch.full_like(problem.share, 0.5 / 7)
    uneven[0] = 0.5
    members = torch.combinations(torch.arange(8), count).T
    cohorts = torch.zeros(8, 56, dtype=REAL).scatter(0, members, 1.0)
    equal = torch.full_like(uneven, 1 / 8)
    for name, share in (("equal clients", equal), ("one holds half", uneven)):
        weights = cohorts * share[:, None]
        weights = weights / weights.sum(0)
        both = (share, weights.mean(1))
        whole, effective = (Quadratics(problem.curvature, problem.centre, own) for own in both)
        drawn = torch.randint(56, (steps, repetitions), generator=generator)
        final = final_state(
            whole, start, rate, steps=steps, repetitions=repetitions,
            cohort=(weights[:, columns] for columns in drawn).__next__,
        ).server[0]  # fmt: skip
        error = final.var(0).sum() / repetitions
        limits = (one.constrained_optimum(start) for one in (whole, effective))
        off, off_effective = (square(final.mean(0) - one) / error for one in limits)
        found.zero(f"{name}: drift of 1'w_t, largest", final.sum(-1) - start.sum(), 1e-10)
        found.zero(f"{name}: |mean w_T - w_c|^2, in squared standard errors", off, 6.0,
                   basis="not claimed")  # fmt: skip
        found.zero(f"{name}: |mean w_T - limit for E[weights]|^2, the same", off_effective, 6.0)


@check("E5", "Server learning rate")
def _server_rate(size: Size, found: Finding) -> None:
    """eta_s changes neither the sum nor the limit.

    With constant steps the limit is a fixed point of the round, off w_c by the order of n.
    """
    steps, constant, long = min(size.steps, 5000), 0.05, 1500
    found.setting = f"{CLIENTS}, {steps:,} steps n_t, or {long:,} of {constant}"
    _, problem, start, rate = setup(105)
    limit = problem.constrained_optimum(start)
    fixed, nearer = (_fixed_point(problem, start, n) for n in (constant, constant / 2))
    for moved in (0.5, 1.5):
        run = partial(final_state, problem, start, server_rate=moved)
        end = run(rate, steps=steps).server[0][0]
        stuck = run(lambda _: constant, steps=long).server[0][0]
        found.zero(f"eta_s = {moved}: drift of 1'w_t", (end - start).sum(), 1e-11)
        found.zero(f"eta_s = {moved}: |w_T - w_c|^2", square(end - limit), _tolerance(steps))
        found.zero(f"eta_s = {moved}, constant steps: |w_T - fixed point|", (stuck - fixed).norm(),
                   1e-9)  # fmt: skip
    found.add("constant steps: |fixed point - w_c|^2, halving n", 0.25,
              square(nearer - limit) / square(fixed - limit), 0.05)  # fmt: skip


def _fixed_point(problem: Quadratics, start: Tensor, n: float) -> Tensor:
    """Solve for the fixed point of a round of constant steps on the hyperplane."""
    basis = descent.hyperplane_basis(problem.dims)
    inside = problem.restricted(start, basis)
    one = eye(problem.dims - 1)
    left = one - torch.linalg.matrix_power(one - n * inside.curvature, LOCAL_STEPS)
    weighted = inside.share[:, None, None] * left
    pull = times(weighted, inside.centre).sum(0)
    inner: Tensor = torch.linalg.solve(weighted.sum(0), pull)
    return start + basis @ inner


@check("E6", "Limit with weight decay")
def _decay_limit(size: Size, found: Finding) -> None:
    """The limit minimises F + lambda |w|^2 / 2 among vectors of zero sum, whatever the start."""
    decay, steps = 0.5, min(size.steps, 5000)
    found.setting = f"{CLIENTS}, lambda = {decay}, {steps:,} steps, two starts"
    generator = seeded(106)
    problem = Quadratics.draw(generator)
    rate = descent.theorems_schedule(problem)
    curvature = problem.curvature + decay * eye(problem.dims)
    pull = times(problem.curvature, problem.centre)
    ridge = Quadratics(curvature, torch.linalg.solve(curvature, pull), problem.share)
    limit = ridge.constrained_optimum(torch.zeros(problem.dims, dtype=REAL))
    product = math.prod(1.0 - decay * rate(step) for step in range(steps))
    for name, offset in (("sum +12", 1.0), ("sum \u221224", -2.0)):
        start = descent.zero_mean(normal(generator, problem.dims)) + offset
        end = final_state(problem, start, rate, steps=steps, decay=decay).server[0][0]
        left = float(start.sum()) * product
        # The sum decays like t^-(lambda beta); its remainder acts as a constraint.
        there = ridge.constrained_optimum(limit + left / problem.dims)
        found.add(f"{name}: 1'w_T", left, end.sum(), 1e-11)
        found.zero(f"{name}: |w_T - ridge minimiser with that sum|^2", square(end - there),
                   _tolerance(steps))  # fmt: skip
        found.zero(f"{name}: |w_T - limit|^2", square(end - limit),
                   2.0 * left**2 / problem.dims + _tolerance(steps))  # fmt: skip


@check("E11", "Step sizes with a small beta")
def _small_beta(size: Size, found: Finding) -> None:
    """With n_t = beta/(t + gamma), E |w_t - w*|^2 = O(1/t) for every beta > 0."""
    found.remedy = "for beta > 1/mu, as the theorem assumes; on quadratics for beta > 1/(2 mu)"
    steps = min(size.steps, 2000)
    found.setting = f"2 clients, F_k = |w|^2 / 2, d = 2, gamma = 8, no noise, {steps:,} steps"
    half, start = torch.full((2,), 0.5, dtype=REAL), torch.tensor([1.0, -1.0], dtype=REAL)
    problem = Quadratics(eye(2).expand(2, 2, 2), torch.zeros(2, 2, dtype=REAL), half)
    for beta in (0.25, 0.75, 2.0):
        states = descent.descend(problem, start, Schedule(beta, 8.0), steps=steps)
        seen = {state.step: square(state.server[0]) for state in states}
        fitted = slope(list(seen), list(seen.values()))
        # The product of 1 - beta/(t + 8) falls like t^-beta.
        logs = [math.lgamma(t + 8) - math.lgamma(t + 8 - beta) for t in (0, steps)]
        found.at_most(f"beta = {beta}/mu: log-log slope", -1.0, fitted, 0.05, basis="not claimed")
        found.add(f"beta = {beta}/mu: |w_T|^2, by Gamma functions",
                  2.0 * math.exp(2.0 * (logs[0] - logs[1])), seen[steps], 1e-9,
                  "relative")  # fmt: skip
