"""T4 to T8: one step, the rate, the condition on the start, weight decay, and drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.descent import LOCAL_STEPS, setup
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

SETTING = "8 clients, d = 12, eigenvalues 1 to 4, E = 5, n_t = 2/(mu (t + 8L/mu)), noise 0.5"


class Run(NamedTuple):
    """Squared distances of FedZMG and FedAvg along one run, means over repetitions."""

    problem: Quadratics
    start: Tensor
    steps: list[int]
    projected: list[float]
    """FedZMG's distance to the constrained optimum."""
    plain: list[float]
    """FedAvg's distance to the optimum."""
    to_optimum: list[float]
    """FedZMG's distance to the optimum."""
    last: Tensor
    """FedZMG's last models, ``[repetitions, d]``."""
    second_moment: float
    """``G^2``: the largest mean square of a stochastic gradient of FedAvg's clients."""
    projected_moment: float
    """``G^2`` of FedZMG's projected gradients."""


def marks(steps: int, count: int = 60) -> list[int]:
    """Choose ends of rounds to measure at, evenly spaced on a logarithmic axis."""
    rounds = steps // LOCAL_STEPS
    found = {round(rounds ** (i / (count - 1))) for i in range(count)}
    return sorted(LOCAL_STEPS * r for r in found)


_LOCKS: defaultdict[tuple[int, float, Size], Lock] = defaultdict(Lock)


def paired_run(seed: int, offset: float, size: Size) -> Run:
    """Run FedZMG and FedAvg on the same problem, start and noise.

    The start is the optimum plus a zero-sum vector plus ``offset`` in every entry. Checks in
    different threads share a run: it is computed once.
    """
    with _LOCKS[seed, offset, size]:
        return computed_run(seed, offset, size)


@cache
def computed_run(seed: int, offset: float, size: Size) -> Run:
    """Compute the run of :func:`paired_run`."""
    _, problem, start, rate = setup(seed, offset, zero_sum=True)
    clients, dims = problem.centre.shape
    target = problem.constrained_optimum(start)
    watched, seen, moments = set(marks(size.steps)), [], [0.0, 0.0]
    for state in descent.descend(
        problem, start, rate, steps=size.steps, repetitions=size.repetitions,
        noise=descent.isotropic(seed, clients, size.repetitions, dims),
        projections=(descent.zero_mean, descent.identity),
    ):  # fmt: skip
        if state.step <= 200 or state.step in watched:
            # Gradients are largest at the start; the noise adds its own power.
            for i, (before, after) in enumerate(zip(state.before, state.after, strict=True)):
                moved = float(((before - after) ** 2).sum(-1).mean(-1).max())
                moments[i] = max(moments[i], moved / rate(state.step - 1) ** 2)
        if state.step in watched:
            zmg, avg = descent.averages(problem, state)
            ways = (zmg - target, avg - problem.optimum, zmg - problem.optimum)
            seen.append([float((way**2).sum(-1).mean()) for way in ways])
    projected, plain, whole = (list(column) for column in zip(*seen, strict=True))
    return Run(
        problem, start, sorted(watched), projected, plain, whole, zmg, moments[1], moments[0]
    )


def slope(x: Sequence[float], y: Sequence[float], share: float = 0.1) -> float:
    """Fit the slope on log-log axes, from ``share`` of the steps on."""
    points = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if a >= share * x[-1]]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    rise = sum((a - mean_x) * (b - mean_y) for a, b in points)
    return float(rise / sum((a - mean_x) ** 2 for a, _ in points))


def one_step(size: Size) -> Finding:
    """T4: Lemma 1 along trajectories without noise, with and without its condition."""
    generator = seeded(4)
    problem = quadratics(generator, problems=(size.problems,))
    rate = descent.theorems_schedule(problem)
    zero_sum = descent.zero_mean(normal(generator, size.problems, problem.dims))
    counts = []
    for offset in (0.0, 1.0):
        start = problem.optimum + zero_sum + offset
        violated = torch.zeros(size.problems, dtype=torch.bool)
        tight = violated.clone()
        for state in descent.descend(problem, start, rate, steps=300):
            n = rate(state.step - 1)
            left, right, kept = _lemma(problem, state, n)
            violated |= left > right + 1e-12
            tight |= left > right - kept + 1e-12
        counts.append((int(violated.sum()), int(tight.sum())))
    (held, held_tight), (failed, _) = counts
    return Finding(
        "T4",
        "One-step inequality (Lemma 1)",
        "if 1'(w_0 - w*) = 0, the distance after a step obeys the recursion of Lemma 1",
        f"{size.problems} random problems, 300 steps each, no noise",
        (
            Value("trajectories that violate it", 0, held, 0, stated=True),
            Value("the same with the negative term kept", 0, held_tight, 0, stated=True),
            # The distance stays positive while the bound shrinks: every trajectory must
            # violate the recursion once steps are small.
            Value("violations if 1 is added to w_0: all", size.problems, failed, 0),
        ),
    )  # fmt: skip


def _lemma(problem: Quadratics, state: descent.State, n: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute both sides of Lemma 1, and the term that the paper drops, for each problem."""
    share = problem.share
    before, after = state.before[0][:, :, 0], state.after[0][:, :, 0]
    mean, moved = ((share[..., None] * models).sum(1) for models in (before, after))
    spread = (share * ((before - mean[:, None]) ** 2).sum(-1)).sum(-1)
    left = ((moved - problem.optimum) ** 2).sum(-1)
    right = (1.0 - n * problem.convexity) * ((mean - problem.optimum) ** 2).sum(-1)
    right = right + 2.0 * spread + 6.0 * problem.smoothness * problem.heterogeneity * n**2
    gradients = (problem.curvature @ (before - problem.centre)[..., None]).squeeze(-1)
    intensity = (share * gradients.sum(-1) ** 2).sum(-1) / problem.dims
    return left, right, n**2 * intensity


def rate(size: Size) -> Finding:
    """T5: with the condition met, the squared distance to the optimum falls like 1/t."""
    run = paired_run(5, 0.0, size)
    schedule = descent.theorems_schedule(run.problem)
    methods = {"FedZMG": descent.zero_mean, "FedAvg": descent.identity}
    # Exact and costly: only as far as the drift within rounds counts.
    watched = min(size.steps, 2500)
    exact = descent.expected_distances(
        run.problem, run.start, run.problem.optimum, schedule, steps=watched,
        projections=tuple(methods.values()),
    )  # fmt: skip
    early = [i for i, step in enumerate(run.steps) if step <= watched]
    lines, series, constants = [], {}, []
    spaces = hyperplane_basis(run.problem.dims), torch.eye(run.problem.dims, dtype=REAL)
    tolerance = 3.0 / size.repetitions**0.5
    for i, (name, measured) in enumerate(zip(methods, (run.projected, run.plain), strict=True)):
        expected = [exact[run.steps[j]][i] for j in early]
        constants.append(descent.asymptotic_constant(run.problem, schedule, spaces[i]))
        last = run.steps[-1]
        lines += [
            Value(f"{name}: log-log slope", -1.0, slope(run.steps, measured), 0.05, "at most",
                  True),
            Value(f"{name}: E |w_t - w*|^2 at t = {run.steps[early[-1]]:,}, exact", expected[-1],
                  measured[early[-1]], tolerance, "relative"),
            Value(f"{name}: E |w_T - w*|^2, closed form of 1/T", constants[-1] / (last + 1),
                  measured[-1], tolerance + 300.0 / last, "relative"),
        ]  # fmt: skip
        series[name] = (run.steps, measured)
        series[f"{name}, exact"] = ([run.steps[j] for j in early], expected)
    dims = run.problem.dims
    lines.append(
        Value("FedZMG / FedAvg at T, near (d-1)/d", (dims - 1) / dims,
              run.projected[-1] / run.plain[-1], 0.06)
    )  # fmt: skip
    return Finding(
        "T5",
        "Rate O(1/T)",
        "with 1'(w_0 - w*) = 0, E |w_t - w*|^2 = O(1/t) for FedZMG as for FedAvg",
        f"{SETTING}, {size.repetitions} repetitions, T = {size.steps:,}",
        tuple(lines),
        series=series,
    )


def violated_condition(size: Size) -> Finding:
    """T6: from any other start the limit is the minimiser on the hyperplane through it."""
    run = paired_run(6, 1.0, size)
    problem = run.problem
    limit = problem.constrained_optimum(run.start)
    far = square(limit - problem.optimum)
    gap = float(problem.constrained_gap(run.start))
    sums = run.last.sum(-1) - run.start.sum()
    return Finding(
        "T6",
        "The condition on the start, and where the method goes without it",
        "E |w_t - w*|^2 <= delta/(gamma + t), as the theorem states without a condition on w_0",
        f"{SETTING}, {size.repetitions} repetitions, T = {size.steps:,}; 1'(w_0 - w*) = 12",
        (
            Value("E |w_T - w*|^2, at most a tenth of the start's", 0.1 * run.to_optimum[0],
                  run.to_optimum[-1], 0.0, "at most", True),
            Value("E |w_T - w*|^2 = |w_c - w*|^2", far, run.to_optimum[-1], 0.01, "relative"),
            Value("F(w_T) - F* = s^2/(2 1'A^-1 1)", gap, float(problem.gap(run.last).mean()), 0.01,
                  "relative"),
            Value("log-log slope of E |w_t - w_c|^2", -1.0, slope(run.steps, run.projected), 0.05,
                  "at most"),
            Value("drift of 1'w_t, largest", 0.0, float(sums.abs().max()), 1e-10),
            Value("FedAvg from the same start: |w_T - w*|^2", 0.0, run.plain[-1], 1e-3),
        ),
        "under 1'(w_0 - w*) = 0; in general the limit is the minimiser on the hyperplane of w_0",
        series={
            "FedZMG to w*": (run.steps, run.to_optimum),
            "FedZMG to w_c": (run.steps, run.projected),
            "FedAvg to w*": (run.steps, run.plain),
            "predicted |w_c - w*|^2": ([run.steps[0], run.steps[-1]], [far, far]),
        },
    )  # fmt: skip


def weight_decay(size: Size) -> Finding:
    """T7: decay shrinks the sum, which is no longer conserved."""
    decay = 0.05
    _, problem, start, schedule = setup(7, 1.0, zero_sum=True)
    predicted, worst, before = float(start.sum()), 0.0, float(start.sum())
    steps = min(size.steps, 5000)
    watched, seen = set(marks(steps)), []
    for state in descent.descend(problem, start, schedule, steps=steps, decay=decay):
        predicted *= 1.0 - decay * schedule(state.step - 1)
        measured = float(descent.averages(problem, state)[0].sum())
        worst = max(worst, abs(measured - predicted))
        if state.step in watched:
            seen.append((float(state.step), measured, predicted))
    t, sums, products = (list(column) for column in zip(*seen, strict=True))
    return Finding(
        "T7",
        "Weight decay and the conserved sum",
        "1'w_t stays what it was, which the proof needs, also for the algorithm as it is run",
        f"{SETTING.removesuffix(', noise 0.5')}, lambda = {decay}, {steps:,} steps",
        (
            Value("1'w_T", before, measured, 1e-9, "relative", stated=True),
            Value("1'w_T = 1'w_0 prod (1 - lambda n_t)", predicted, measured, 1e-12),
            Value("error of the product, largest over steps", 0.0, worst, 1e-11),
        ),
        "without weight decay; with it the sum follows prod (1 - lambda n_t) to zero",
        series={"1'w_t": (t, sums), "product": (t, products)},
    )


def drift(size: Size) -> Finding:
    """T8: distance of clients from their mean after one round."""
    rate, steps, shift = 0.05, 20, 3.0
    generator = seeded(8)
    still = quadratics(generator, spread=0.4)
    intensity = shift * normal(generator, *still.share.shape)
    moved = Quadratics(still.curvature, still.centre + intensity[:, None], still.share)
    # A shift of the gradients themselves: A_k (w - c_k) + u_k 1.
    pushed_centre = still.centre - torch.linalg.solve(
        still.curvature, intensity[:, None, None].expand(*still.centre.shape, 1)
    ).squeeze(-1)
    pushed = Quadratics(still.curvature, pushed_centre, still.share)
    start = torch.zeros(still.dims, dtype=REAL)
    lines = []
    spreads: dict[str, list[float]] = {}
    for name, problem in (("no shift", still), ("shifted optima", moved),
                          ("shifted gradients", pushed)):  # fmt: skip
        both = []
        for project in (descent.identity, descent.zero_mean):
            *_, state = descent.descend(
                problem, start, lambda _: rate, steps=steps, projections=(project,),
                local_steps=steps,
            )  # fmt: skip
            both.append(_spread(problem.share, state.after[0][:, 0]))
        spreads[name] = both
        lines.append(
            Value(f"{name}: spread with / without projection", 1.0, both[1] / both[0], 0.0,
                  "at most", True)
        )  # fmt: skip
    identity = torch.eye(still.dims, dtype=REAL)
    for name, problem in (("no shift", still), ("shifted optima", moved)):
        for method, phi, measured in zip(
            ("FedAvg", "FedZMG"), (identity, descent.zero_mean(identity)), spreads[name],
            strict=True,
        ):  # fmt: skip
            lines.append(
                Value(f"{name}: {method}'s spread, closed form",
                      _closed_spread(problem, phi, rate, steps), measured, 1e-9, "relative")
            )  # fmt: skip
    lines.append(
        Value("shifted gradients: FedZMG as without a shift", spreads["no shift"][1],
              spreads["shifted gradients"][1], 1e-9, "relative")
    )  # fmt: skip
    # In long rounds on few, badly conditioned coordinates clients reach their own optima. Those
    # on a line may lie farther apart than those in the plane.
    hard = [
        quadratics(generator, clients=2, dims=2, eigenvalues=(0.05, 4.0))
        for _ in range(size.problems)
    ]
    first, long = (sum(_ratio(p, 0.2, n) > 1.0 + 1e-9 for p in hard) for n in (1, 50))
    lines += [
        Value("d = 2, 50 steps: problems whose spread grows", 0, long, 0, stated=True),
        Value("d = 2, one step: problems whose spread grows", 0, first, 0),
    ]
    stretch = 0.05 + 3.95 * torch.rand(size.problems, 2, 1, 1, generator=generator, dtype=REAL)
    round_ = [
        Quadratics(a * torch.eye(2, dtype=REAL), p.centre, p.share)
        for a, p in zip(stretch, hard, strict=True)
    ]
    grown = sum(_ratio(p, 0.2, 50) > 1.0 + 1e-9 for p in round_)
    lines.append(Value("d = 2, 50 steps, A_k 1 along 1: problems that grow", 0, grown, 0))
    return Finding(
        "T8",
        "Drift within a round",
        "projection shortens the distances between the clients' models",
        f"8 clients, d = 12, one round of {steps} steps of {rate}, intensity shift {shift:g}; "
        f"then {size.problems} problems of 2 clients, d = 2, eigenvalues 0.05 to 4, steps of 0.2",
        tuple(lines),
        "for the first step of a round, and for any number if every A_k maps 1 to a multiple of 1",
        series={name: ([0.0, 1.0], both) for name, both in spreads.items()},
    )


def _ratio(problem: Quadratics, rate: float, steps: int) -> float:
    """Divide the spread with projection by that without, after one round from zero."""
    identity = torch.eye(problem.dims, dtype=REAL)
    projected, plain = (
        _closed_spread(problem, phi, rate, steps) for phi in (descent.zero_mean(identity), identity)
    )
    return projected / plain


def _spread(share: Tensor, models: Tensor) -> float:
    mean = (share[:, None] * models).sum(0)
    return float((share * ((models - mean) ** 2).sum(-1)).sum())


def _closed_spread(problem: Quadratics, phi: Tensor, rate: float, steps: int) -> float:
    """Compute the spread after steps from zero: a geometric sum, by eigenvalues."""
    values, vectors = torch.linalg.eigh(phi @ problem.curvature @ phi)
    flat = values.abs() < 1e-9
    grown = torch.where(flat, rate * steps, (1 - (1 - rate * values) ** steps) / values)
    pull = (phi @ problem.curvature @ problem.centre[..., None]).squeeze(-1)
    inside = (vectors.mT @ pull[..., None]).squeeze(-1)
    models = (vectors @ (grown * inside)[..., None]).squeeze(-1)
    return _spread(problem.share, models)
