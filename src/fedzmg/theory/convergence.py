"""T4 to T9, T13: one step, rate, condition on the start, decay, drift, logistic regression."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedzmg.theory import descent
from fedzmg.theory.descent import LOCAL_STEPS, Projection, Schedule, marks, setup
from fedzmg.theory.finding import Finding, Size, check
from fedzmg.theory.problems import REAL, Logistic, Quadratics, eye, normal, seeded, square, times

SETTING = "8 clients, d = 12, eigenvalues 1 to 4, E = 5, n_t = 2/(mu (t + 8L/mu)), noise 0.5"
ON_THE_HYPERPLANE = "under 1'(w_0 - w*) = 0; "


class Run(NamedTuple):
    """Squared distances of FedZMG and FedAvg along one run, means over repetitions."""

    problem: Quadratics
    start: Tensor
    steps: list[int]
    projected: list[float]  # FedZMG's distance to the constrained optimum
    plain: list[float]  # FedAvg's distance to the optimum
    to_optimum: list[float]  # FedZMG's distance to the optimum
    last: Tensor  # FedZMG's last models, [repetitions, d]
    projected_moment: float  # G^2: the largest mean square of FedZMG's projected gradients
    second_moment: float  # G^2 of FedAvg's gradients


@cache
def paired_run(seed: int, offset: float, size: Size) -> Run:
    """Run FedZMG and FedAvg from the optimum plus a zero-sum vector plus ``offset``."""
    if offset:  # the limit is far from the optimum: a quarter of the repetitions shows it
        size = size._replace(repetitions=max(20, size.repetitions // 4))
    _, problem, start, rate = setup(seed, offset, zero_sum=True)
    target = problem.constrained_optimum(start)
    watched, seen, moments = set(marks(size.steps)), [], [0.0, 0.0]
    for state in descent.descend(
        problem, start, rate, steps=size.steps, repetitions=size.repetitions,
        noise=descent.isotropic(seed, len(problem.share), size.repetitions, problem.dims),
        projections=(descent.zero_mean, descent.identity),
    ):  # fmt: skip
        if state.step <= 200 or state.step in watched:
            # Gradients are largest at the start; the noise adds its own power.
            for i, (before, after) in enumerate(zip(state.before, state.after, strict=True)):
                moved = float(((before - after) ** 2).sum(-1).mean(-1).max())
                moments[i] = max(moments[i], moved / rate(state.step - 1) ** 2)
        if state.step in watched:
            zmg, avg = state.server
            ways = (zmg - target, avg - problem.optimum, zmg - problem.optimum)
            seen.append([float((way**2).sum(-1).mean()) for way in ways])
    projected, plain, whole = (list(column) for column in zip(*seen, strict=True))
    return Run(problem, start, sorted(watched), projected, plain, whole, zmg, *moments)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Fit the slope on log-log axes, over the last nine tenths of the steps."""
    points = np.log([(a, b) for a, b in zip(x, y, strict=True) if a >= 0.1 * x[-1]])
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


@check("T4", "One-step inequality (Lemma 1)")
def _one_step(size: Size, found: Finding) -> None:
    """If 1'(w_0 - w*) = 0, the distance after a step obeys the recursion of Lemma 1."""
    found.setting = f"{size.problems} random problems, 300 steps each, no noise"
    _, problem, start, rate = setup(4, 0.0, size.problems, 8, zero_sum=True)
    counts = []
    for offset in (0.0, 1.0):
        violated = torch.zeros(2, size.problems, dtype=torch.bool)
        for state in descent.descend(problem, start + offset, rate, steps=300):
            left, right, kept = _lemma(problem, state, rate(state.step - 1))
            violated |= left > torch.stack([right, right - kept]) + 1e-12
        counts.append(violated.sum(1).tolist())
    (held, held_tight), (failed, _) = counts
    found.add("trajectories that violate it", 0, held, 0, basis="claim")
    found.add("the same with the negative term kept", 0, held_tight, 0, basis="claim")
    # The distance stays positive while the bound shrinks: every trajectory must violate the
    # recursion once steps are small.
    found.add("violations if 1 is added to w_0: all", size.problems, failed, 0)


def _lemma(problem: Quadratics, state: descent.State, n: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute both sides of Lemma 1, and the term that the paper drops, for each problem."""
    share = problem.share
    before, after = state.before[0][:, :, 0], state.after[0][:, :, 0]
    mean, moved = ((share[..., None] * models).sum(1) for models in (before, after))
    spread = _spread(share, before)
    left = ((moved - problem.optimum) ** 2).sum(-1)
    right = (1.0 - n * problem.convexity) * ((mean - problem.optimum) ** 2).sum(-1)
    right = right + 2.0 * spread + 6.0 * problem.smoothness * problem.heterogeneity * n**2
    gradients = times(problem.curvature, before - problem.centre)
    intensity = (share * gradients.sum(-1) ** 2).sum(-1) / problem.dims
    return left, right, n**2 * intensity


@check("T5", "Rate O(1/T)")
def _rate(size: Size, found: Finding) -> None:
    """With 1'(w_0 - w*) = 0, E |w_t - w*|^2 = O(1/t) for FedZMG as for FedAvg."""
    found.setting = f"{SETTING}, {size.repetitions} repetitions, T = {size.steps:,}"
    run = paired_run(5, 0.0, size)
    dims, last = run.problem.dims, run.steps[-1]
    schedule = descent.theorems_schedule(run.problem)
    exact = descent.expected_distances(
        run.problem, run.start, schedule, steps=last,
        projections=(descent.zero_mean, descent.identity),
    )  # fmt: skip
    for i, (name, measured, basis) in enumerate((
        ("FedZMG", run.projected, descent.hyperplane_basis(dims)), ("FedAvg", run.plain, eye(dims)),
    )):  # fmt: skip
        expected = [exact[step][i] for step in run.steps]
        closed = descent.asymptotic_constant(run.problem, schedule, basis) / (last + 1)
        slope_ = slope(run.steps, measured)
        found.at_most(f"{name}: log-log slope", -1.0, slope_, 0.05, basis="claim")
        found.add(f"{name}: E |w_T - w*|^2, exact", expected[-1], measured[-1],
                  2.0 / size.repetitions**0.5, "relative")  # fmt: skip
        found.add(f"{name}: exact E |w_T - w*|^2, closed form of 1/T", closed, expected[-1],
                  300.0 / last, "relative")  # fmt: skip
        found.series[name] = (run.steps, measured)
        found.series[f"{name}, exact"] = (run.steps, expected)
    ratio = run.projected[-1] / run.plain[-1]
    found.add("FedZMG / FedAvg at T, near (d-1)/d", (dims - 1) / dims, ratio, 0.06)


@check("T6", "Condition on the start, and the limit without it")
def _violated_condition(size: Size, found: Finding) -> None:
    """E |w_t - w*|^2 <= delta/(gamma + t), as the theorem states without a condition on w_0."""
    limit = "in general the limit is the minimiser on the hyperplane of w_0"
    found.remedy = f"{ON_THE_HYPERPLANE}{limit}"
    run = paired_run(6, 1.0, size)
    found.setting = f"{SETTING}, {len(run.last)} repetitions, T = {size.steps:,}; 1'(w_0 - w*) = 12"
    problem = run.problem
    far = square(problem.constrained_optimum(run.start) - problem.optimum)
    gap = float(problem.constrained_gap(run.start))
    end = run.to_optimum[-1]
    tenth = 0.1 * run.to_optimum[0]
    found.at_most("E |w_T - w*|^2, at most a tenth of the start's", tenth, end, basis="claim")
    found.add("E |w_T - w*|^2 = |w_c - w*|^2", far, end, 0.01, "relative")
    found.add("F(w_T) - F* = s^2/(2 1'A^-1 1)", gap, problem.gap(run.last).mean(), 0.01, "relative")
    found.at_most("log-log slope of E |w_t - w_c|^2", -1.0, slope(run.steps, run.projected), 0.05)
    found.zero("drift of 1'w_t, largest", run.last.sum(-1) - run.start.sum(), 1e-10)
    found.zero("FedAvg from the same start: |w_T - w*|^2", run.plain[-1], 1e-3)
    found.series = {
        "FedZMG to w*": (run.steps, run.to_optimum),
        "FedZMG to w_c": (run.steps, run.projected),
        "FedAvg to w*": (run.steps, run.plain),
        "predicted |w_c - w*|^2": ([run.steps[0], run.steps[-1]], [far, far]),
    }


@check("T7", "Weight decay and the conserved sum")
def _weight_decay(size: Size, found: Finding) -> None:
    """The proof's conserved sum 1'w_t is also conserved with decay, as in the experiments."""
    found.remedy = "without weight decay; with it the sum follows prod (1 - lambda n_t) to zero"
    decay, steps = 0.05, min(size.steps, 5000)
    found.setting = f"{SETTING.removesuffix(', noise 0.5')}, lambda = {decay}, {steps:,} steps"
    _, problem, start, schedule = setup(7, 1.0, zero_sum=True)
    predicted, sums, products = float(start.sum()), {}, {}
    for state in descent.descend(problem, start, schedule, steps=steps, decay=decay):
        predicted *= 1.0 - decay * schedule(state.step - 1)
        if state.step % LOCAL_STEPS == 0:
            products[state.step], sums[state.step] = predicted, float(state.server[0].sum())
    errors = max(abs(sums[step] - products[step]) for step in sums)
    found.add("1'w_T", float(start.sum()), sums[steps], 1e-9, "relative", basis="not claimed")
    found.add("1'w_T = 1'w_0 prod (1 - lambda n_t)", predicted, sums[steps], 1e-12)
    found.zero("error of the product, largest over rounds", errors, 1e-11)
    watched = marks(steps)
    for name, values in (("1'w_t", sums), ("product", products)):
        found.series[name] = (watched, [values[step] for step in watched])


@check("T8", "Drift within a round")
def _drift(size: Size, found: Finding) -> None:
    """Projection brings gradients at one model closer, and the clients' models after a round."""
    found.remedy = "after one step, and after any number if every A_k maps 1 to a multiple of 1"
    rate, steps, shift = 0.05, 20, 3.0
    found.setting = f"8 clients, d = 12, one round of {steps} steps of {rate}, intensity shift "
    found.setting += f"{shift:g}; then {size.problems} problems of 2 clients, d = 2, eigenvalues "
    found.setting += "0.05 to 4, steps of 0.2"
    methods = {"FedAvg": descent.identity, "FedZMG": descent.zero_mean}
    generator = seeded(8)
    still = Quadratics.draw(generator, spread=0.4)
    moves = (shift * normal(generator, *still.share.shape))[:, None].expand_as(still.centre)
    # A shift of the gradients themselves: A_k (w - c_k) + u_k 1.
    pushes = -torch.linalg.solve(still.curvature, moves)
    start, spreads = torch.zeros(still.dims, dtype=REAL), {}
    for name, moved in (
        ("no shift", 0.0 * moves), ("shifted optima", moves), ("shifted gradients", pushes),
    ):  # fmt: skip
        problem = Quadratics(still.curvature, still.centre + moved, still.share)
        last = descent.final_state(
            problem, start, lambda _: rate, steps=steps, local_steps=steps,
            projections=tuple(methods.values()),
        )  # fmt: skip
        spreads[name] = [float(_spread(problem.share, one[:, 0])) for one in last.after]
        ratio = spreads[name][1] / spreads[name][0]
        found.at_most(f"{name}: spread with / without projection", 1.0, ratio, basis="not claimed")
        for (method, project), measured in zip(methods.items(), spreads[name], strict=True):
            found.add(f"{name}: {method}'s spread, closed form",
                      float(_closed_spread(problem, project, rate, steps)), measured, 1e-9,
                      "relative")  # fmt: skip
    found.add("shifted gradients: FedZMG as without a shift", spreads["no shift"][1],
              spreads["shifted gradients"][1], 1e-9, "relative")  # fmt: skip
    # In long rounds on few, badly conditioned coordinates clients reach their own optima. Those
    # on a line may lie farther apart than those in the plane.
    hard = Quadratics.draw(generator, size.problems, 2, dims=2, eigenvalues=(0.05, 4.0))
    stretch = 0.05 + 3.95 * torch.rand(size.problems, 2, 1, 1, generator=generator, dtype=REAL)
    round_ = Quadratics(stretch * eye(2), hard.centre, hard.share)

    def grown(problem: Quadratics, steps: int) -> Tensor:
        """Count the problems whose spread grows by the projection."""
        plain, projected = (_closed_spread(problem, m, 0.2, steps) for m in methods.values())
        return (projected > plain * (1.0 + 1e-9)).sum()

    found.add("d = 2, one step: problems whose spread grows", 0, grown(hard, 1), basis="claim")
    many = grown(hard, 50)
    found.add("d = 2, 50 steps: problems whose spread grows", 0, many, basis="not claimed")
    found.add("d = 2, 50 steps, A_k 1 along 1: problems that grow", 0, grown(round_, 50))


def _spread(share: Tensor, models: Tensor) -> Tensor:
    """Compute ``sum_k p_k |w_k - wbar|^2`` of models ``[..., clients, d]``."""
    mean = (share[..., None] * models).sum(-2, keepdim=True)
    return (share * ((models - mean) ** 2).sum(-1)).sum(-1)


def _closed_spread(problem: Quadratics, project: Projection, rate: float, steps: int) -> Tensor:
    """Compute the spread after steps from zero: a geometric sum, by eigenvalues."""
    phi = project(eye(problem.dims))
    values, vectors = torch.linalg.eigh(phi @ problem.curvature @ phi)
    flat = values.abs() < 1e-9
    grown = torch.where(flat, rate * steps, (1 - (1 - rate * values) ** steps) / values)
    inside = times(vectors.mT, times(phi @ problem.curvature, problem.centre))
    return _spread(problem.share, times(vectors, grown * inside))


@check("T13", "Drift between averagings (Lemma 3)")
def _drift_bound(size: Size, found: Finding) -> None:
    """If n_t halves at most in E steps, E sum_k p_k |w_t^k - wbar_t|^2 <= (2 n_t (E - 1) G)^2."""
    found.setting = f"{size.problems} random problems, 300 steps each, no noise; then two clients "
    found.setting += f"with constant, opposite gradients, d = 2, a round of E = {LOCAL_STEPS}"
    generator = seeded(13)
    problem = Quadratics.draw(generator, size.problems, 8)
    start = normal(generator, size.problems, problem.dims)
    rate = descent.theorems_schedule(problem)
    drift, moments = torch.zeros((), dtype=REAL), torch.zeros((), dtype=REAL)
    for state in descent.descend(problem, start, rate, steps=300):
        models = state.before[0][:, :, 0]
        gradients = times(problem.curvature, models - problem.centre)
        both = torch.stack([gradients, descent.zero_mean(gradients)])
        moments = torch.maximum(moments, (both**2).sum(-1).amax(-1))
        drift = torch.maximum(drift, _spread(problem.share, models) / rate(state.step - 1) ** 2)
    bound = 4.0 * (LOCAL_STEPS - 1) ** 2
    largest, sharper = drift / (bound * moments)
    found.at_most("drift / bound, largest", 1.0, largest, basis="claim")
    found.at_most("the same with G of projected gradients", 1.0, sharper)
    # Nearly flat losses with far optima: gradients are (1, -1) and (-1, 1).
    away = torch.tensor([[1e9, -1e9], [-1e9, 1e9]], dtype=REAL)
    pair = Quadratics(1e-9 * eye(2).expand(2, 2, 2), away, torch.full((2,), 0.5, dtype=REAL))
    for fall in (2.0, 3.0):
        state = descent.final_state(
            pair, torch.zeros(2, dtype=REAL), lambda t, n=fall: n if t < LOCAL_STEPS - 1 else 1.0,
            steps=LOCAL_STEPS,
        )  # fmt: skip
        ratio = _spread(pair.share, state.before[0][:, 0]) / (2.0 * bound)
        found.add(f"opposite gradients, n_t falls {fall:g}-fold: drift / bound", fall**2 / 4, ratio,
                  1e-6)  # fmt: skip


@check("T9", "Logistic regression")
def _logistic(size: Size, found: Finding) -> None:
    """FedZMG reaches the minimum of a strongly convex loss from any start."""
    found.remedy = f"{ON_THE_HYPERPLANE}otherwise the limit is the minimum on the hyperplane"
    steps = min(size.steps, 2500)
    found.setting = f"6 clients, d = 8, l2 = 0.05, E = 5, w_0 = 0, full gradients, {steps:,} steps"
    plain, biased = Logistic.draw(seeded(9)), Logistic.draw(seeded(9), bias=True)
    # Drift within a round costs loss of second order in the step size.
    tolerance = 3e-7 * max(1.0, 5000 / steps) ** 2
    watched = set(marks(steps))
    inside = descent.hyperplane_basis(plain.dims)
    padded: Tensor = torch.block_diag(inside, eye(1))  # type: ignore[no-untyped-call]

    def kernel_only(gradients: Tensor) -> Tensor:
        kernel, bias = gradients.tensor_split([plain.dims], -1)
        return torch.cat([descent.zero_mean(kernel), bias], -1)

    for name, problem, basis in (("", plain, inside), ("with a free bias: ", biased, padded)):
        start = torch.zeros(problem.dims, dtype=REAL)
        optimum, limit = (problem.optimum(start, b) for b in (eye(problem.dims), basis))
        least, inner = float(problem.value(optimum)), float(problem.value(limit))
        schedule = Schedule(2.0 / problem.l2, max(8.0 * problem.smoothness / problem.l2, 6.0))
        methods = (kernel_only, descent.identity)
        states = descent.descend(problem, start, schedule, steps=steps, projections=methods)
        seen = [(float(s.step), *s.server) for s in states if s.step in watched]
        t, *ends = zip(*seen, strict=True)
        zmg, avg = (np.array([float(problem.value(one[0])) for one in own]) for own in ends)
        found.zero(f"{name}F(w_T) - F*", zmg[-1] - least, 1e-4, basis="claim")
        found.zero(f"{name}F(w_T) - F(w_c)", zmg[-1] - inner, tolerance)
        found.add(f"{name}F(w_T) - F*, by Newton's method", inner - least, zmg[-1] - least,
                  tolerance)  # fmt: skip
        found.zero(f"{name}FedAvg: F(w_T) - F*", avg[-1] - least, tolerance)
        if problem is plain:
            found.series = {
                "FedZMG to F*": (t, (zmg - least).tolist()),
                "FedZMG to F(w_c)": (t, np.maximum(zmg - inner, 1e-16).tolist()),
                "FedAvg to F*": (t, np.maximum(avg - least, 1e-16).tolist()),
            }
