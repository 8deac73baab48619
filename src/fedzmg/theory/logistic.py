"""T9: logistic regression with an l2 term."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedzmg.theory import descent
from fedzmg.theory.descent import LOCAL_STEPS
from fedzmg.theory.finding import Finding, Size, Value
from fedzmg.theory.problems import REAL, hyperplane_basis, normal, seeded


class Logistic:
    """Clients' mean logistic losses plus ``l2 |w|^2 / 2``.

    Features are ``[clients, examples, d]``, labels -1 or 1.
    """

    def __init__(self, features: Tensor, labels: Tensor, l2: float = 0.05) -> None:
        self.l2 = l2
        self.signed = labels[..., None] * features
        self.share = torch.full((len(features),), 1.0 / len(features), dtype=REAL)
        self.dims = features.shape[-1]
        gram = features.mT @ features / features.shape[-2]
        self.smoothness = 0.25 * float(torch.linalg.eigvalsh(gram).max()) + l2

    def value(self, model: Tensor) -> Tensor:
        """Compute ``F(w)``."""
        return softplus(-self.signed @ model).mean() + 0.5 * self.l2 * (model @ model)

    def gradients(self, models: Tensor) -> Tensor:
        """Compute every client's gradient at its own model, ``[methods, clients, d]``."""
        margins = (self.signed @ models[..., None]).squeeze(-1)
        pull = (torch.sigmoid(-margins)[..., None, :] @ self.signed).squeeze(-2)
        return self.l2 * models - pull / self.signed.shape[-2]

    def hessian(self, model: Tensor) -> Tensor:
        """Compute the Hessian of ``F``."""
        rows = self.signed.flatten(0, 1)
        chance = torch.sigmoid(rows @ model)
        weighted = rows * (chance * (1.0 - chance))[:, None]
        return rows.mT @ weighted / len(rows) + self.l2 * torch.eye(self.dims, dtype=REAL)

    def optimum(self, origin: Tensor, basis: Tensor) -> Tensor:
        """Minimise on ``origin + span(basis)`` by Newton's method."""
        model = origin
        for _ in range(50):
            gradient = basis.mT @ self._gradient(model)
            step = torch.linalg.solve(basis.mT @ self.hessian(model) @ basis, gradient)
            model = model - basis @ step
        return model

    def _gradient(self, model: Tensor) -> Tensor:
        everywhere = model.expand(1, len(self.share), self.dims)
        return (self.share[:, None] * self.gradients(everywhere)[0]).sum(0)


def regressions(generator: torch.Generator, clients: int = 6, examples: int = 40) -> Logistic:
    """Draw clients that differ in the mean of their features and in their true weights."""
    dims = 8
    features = normal(generator, clients, examples, dims) + 0.5 * normal(generator, clients, 1, 1)
    truth = 0.4 + normal(generator, dims) + 0.5 * normal(generator, clients, 1, dims)
    noise = normal(generator, clients, examples)
    return Logistic(features, torch.sign((features * truth).sum(-1) + noise))


def logistic(size: Size) -> Finding:
    """T9: FedZMG ends at the constrained optimum, with and without a free bias."""
    generator = seeded(9)
    problem = regressions(generator)
    biased = Logistic(
        torch.cat([problem.signed, torch.ones_like(problem.signed[..., :1])], -1),
        torch.ones_like(problem.signed[..., 0]),
    )
    steps = min(size.steps, 5000)
    lines, series = [], {}
    for name, chosen in (("", problem), ("with a free bias: ", biased)):
        start = torch.zeros(chosen.dims, dtype=REAL)
        whole = torch.eye(chosen.dims, dtype=REAL)
        inside = hyperplane_basis(problem.dims)
        if chosen is biased:
            padded = torch.zeros(chosen.dims, chosen.dims - 1, dtype=REAL)
            padded[:-1, :-1], padded[-1, -1] = inside, 1.0
            inside = padded
        optimum, limit = (chosen.optimum(start, basis) for basis in (whole, inside))
        least, inner = float(chosen.value(optimum)), float(chosen.value(limit))
        ends, curves = _descend(chosen, start, steps)
        zmg, avg = (float(chosen.value(end)) for end in ends)
        lines += [
            Value(f"{name}F(w_T) - F*", 0.0, zmg - least, 1e-4, stated=True),
            Value(f"{name}F(w_T) - F(w_c)", 0.0, zmg - inner, _tolerance(steps)),
            Value(f"{name}F(w_T) - F*, by Newton's method", inner - least, zmg - least,
                  _tolerance(steps)),
            Value(f"{name}FedAvg: F(w_T) - F*", 0.0, avg - least, _tolerance(steps)),
        ]  # fmt: skip
        if not name:
            series = {
                "FedZMG to F*": (curves[0], [v - least for v in curves[1]]),
                "FedZMG to F(w_c)": (curves[0], [max(v - inner, 1e-16) for v in curves[1]]),
                "FedAvg to F*": (curves[0], [max(v - least, 1e-16) for v in curves[2]]),
            }
    return Finding(
        "T9",
        "Logistic regression",
        "FedZMG reaches the minimum of a strongly convex loss from any start",
        f"6 clients, d = 8, l2 = 0.05, E = 5, w_0 = 0, full gradients, {steps:,} steps",
        tuple(lines),
        "under 1'(w_0 - w*) = 0; otherwise the limit is the minimum on the hyperplane",
        series=series,
    )


def _tolerance(steps: int) -> float:
    """Bound the loss from drift within a round, of second order in the step size."""
    return 1e-7 * max(1.0, 5000 / steps) ** 2


def _descend(
    problem: Logistic, start: Tensor, steps: int
) -> tuple[Tensor, tuple[list[float], list[float], list[float]]]:
    """Run FedZMG and FedAvg; coordinates after the eighth are an unprojected bias."""
    rate = descent.Schedule(2.0 / problem.l2, max(8.0 * problem.smoothness / problem.l2, 6.0))
    clients, kernel = len(problem.share), problem.dims - problem.dims % 8
    models = start.expand(2, clients, problem.dims)
    watched = {round(steps ** (i / 40)) // LOCAL_STEPS * LOCAL_STEPS for i in range(41)}
    seen: tuple[list[float], list[float], list[float]] = ([], [], [])
    for t in range(steps):
        gradients = problem.gradients(models)
        gradients[0, :, :kernel] = descent.zero_mean(gradients[0, :, :kernel])
        models = models - rate(t) * gradients
        if (t + 1) % LOCAL_STEPS == 0:
            mean = (problem.share[:, None] * models).sum(1, keepdim=True)
            models = mean.expand(-1, clients, -1)
            if t + 1 in watched:
                found = (t + 1.0, *(float(problem.value(one[0])) for one in mean))
                for values, value in zip(seen, found, strict=True):
                    values.append(value)
    return models[:, 0], seen
