"""``quadratic`` and ``logistic``: convex problems whose metric is the distance to the optimum."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fedzmg.data.federated import FederatedData, examples
from fedzmg.evaluation import Metric
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.objective import LossFunction
from fedzmg.tasks.preset import Preset, decision
from fedzmg.tasks.protocol import Protocol
from fedzmg.tasks.task import Task

Real = NDArray[np.float64]

INPUTS, EXAMPLES = 12, 60


class Problem(NamedTuple):
    """Data of all clients, a start, and the optima."""

    x: Real
    y: Real
    owners: NDArray[np.int64]
    start: Real
    optimum: Real  # minimiser of the mean loss over all examples
    constrained: Real  # minimiser among models whose entries sum to the start's sum


class Column(nn.Linear):
    """Dense unit without bias; outputs ``x'w``, the l2 term, squared distance to a target."""

    def __init__(self, start: Real, target: Real, l2: float) -> None:
        super().__init__(len(start), 1, bias=False)
        self.weight = nn.Parameter(torch.tensor(start[None], dtype=torch.float32))
        self.target = nn.Parameter(torch.tensor(target[None], dtype=torch.float64), False)
        self.l2 = l2

    def forward(self, input: Tensor) -> Tensor:
        """Compute score, penalty and squared distance, ``[examples, 3]``."""
        score = (input * self.weight).sum(-1)
        penalty = 0.5 * self.l2 * self.weight.square().sum()
        distance = (self.weight - self.target.to(self.weight.dtype)).square().sum()
        return torch.stack([score, penalty.expand_as(score), distance.expand_as(score)], -1)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute half the squared error plus the l2 term."""
    return 0.5 * (outputs[..., 0] - targets).square() + outputs[..., 1]


def log_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the logistic loss of labels -1 and 1 plus the l2 term."""
    # softplus(-x) has other last bits at the end of a tensor, which depends on the pack.
    return outputs[..., 1] - logsigmoid(targets * outputs[..., 0])


DISTANCE = Metric("squared distance", lambda outputs, _: outputs[..., 2], higher_is_better=False)


@dataclass(frozen=True)
class Convex(Preset):
    """Common part of both problems."""

    l2: float = 0.0
    loss: LossFunction = half_square
    start: Literal["shifted", "zero_sum"] = decision("shifted", "start: 1'(w_0 - w*) = 12, or 0")
    distance: Literal["optimum", "constrained"] = decision(
        "optimum", "target of the metric: w*, or the optimum on the start's hyperplane"
    )
    problem_seed: int = decision(0, "seed of the problem")

    def network(self) -> nn.Module:
        return Column(np.zeros(INPUTS), np.zeros(INPUTS), self.l2)

    @abstractmethod
    def clients_data(self) -> tuple[np.random.Generator, list[tuple[Real, Real]]]:
        """Draw inputs and targets of every client; also return the generator."""

    @abstractmethod
    def minimum(self, x: Real, y: Real, start: Real, basis: Real) -> Real:
        """Minimise the mean loss on ``start + span(basis)``."""

    def problem(self) -> Problem:
        """Draw data, start and optima in double precision."""
        rng, drawn = self.clients_data()
        x, y = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
        owners = np.repeat(np.arange(self.clients), EXAMPLES)
        basis = np.eye(INPUTS)
        optimum = self.minimum(x, y, np.zeros(INPUTS), basis)
        away = rng.normal(size=INPUTS)
        start = optimum + (away - away.mean()) + (1.0 if self.start == "shifted" else 0.0)
        basis[:, 0] = 1.0
        zero_sum = np.linalg.qr(basis)[0][:, 1:]
        return Problem(x, y, owners, start, optimum, self.minimum(x, y, start, zero_sum))

    def build(self) -> Task:
        problem = self.problem()
        x, y = problem.x.astype(np.float32), problem.y.astype(np.float32)
        target = problem.optimum if self.distance == "optimum" else problem.constrained
        model = FunctionalModel(Column(problem.start, target, self.l2))
        train = FederatedData.from_arrays(x, y, problem.owners)
        # The mean loss over the training examples is minimised, and it is also reported.
        return Task(
            self.name, model, train, examples(x, y), self.loss, DISTANCE, init="given",
            protocol=self.protocol, preset=self.options(),
        )  # fmt: skip


@dataclass(frozen=True)
class Quadratic(Convex):
    """Least squares on 8 clients, 12 weights: every client's Hessian has eigenvalues from 1 to 4.

    Clients differ in their Hessians and in their own optima. Batches are a third of a client's
    examples: gradients are noisy. The metric is the squared distance to the optimum, or to the
    optimum among models of the start's sum, the limit of projected methods.
    """

    protocol = Protocol(rounds=200, cohort=8, batch_size=20, eval_every=5, threshold=0.01)

    def clients_data(self) -> tuple[np.random.Generator, list[tuple[Real, Real]]]:
        rng = np.random.default_rng([self.problem_seed, 1])
        drawn = []
        for _ in range(self.clients):
            rotation, _ = np.linalg.qr(rng.normal(size=(INPUTS, INPUTS)))
            roots = np.sqrt(np.linspace(1.0, 4.0, INPUTS))
            frame, _ = np.linalg.qr(rng.normal(size=(EXAMPLES, INPUTS + 1)))
            # Columns are orthonormal: x'x / n is the wanted Hessian, the noise moves no optimum.
            x = np.sqrt(EXAMPLES) * frame[:, :INPUTS] * roots @ rotation.T
            noise = 0.2 * np.sqrt(EXAMPLES) * frame[:, INPUTS]
            drawn.append((x, x @ rng.normal(size=INPUTS) + noise))
        return rng, drawn

    def minimum(self, x: Real, y: Real, start: Real, basis: Real) -> Real:
        return start + basis @ np.linalg.lstsq(x @ basis, y - x @ start, rcond=None)[0]


@dataclass(frozen=True)
class Logistic(Convex):
    """Logistic regression with an l2 term of 0.05 on 6 clients, 12 weights, labels -1 and 1.

    Clients differ in the mean of their inputs and in their true weights. The metric is the squared
    distance to the optimum, or to the optimum among models of the start's sum.
    """

    protocol = Protocol(rounds=200, cohort=6, batch_size=20, eval_every=5, threshold=0.01)
    loss: LossFunction = log_loss

    def clients_data(self) -> tuple[np.random.Generator, list[tuple[Real, Real]]]:
        rng = np.random.default_rng([self.problem_seed, 2])
        truth, drawn = 0.4 + rng.normal(size=INPUTS), []
        for _ in range(self.clients):
            x = rng.normal(size=(EXAMPLES, INPUTS)) + 0.5 * rng.normal()
            own = truth + 0.5 * rng.normal(size=INPUTS)
            drawn.append((x, np.where(x @ own + rng.normal(size=EXAMPLES) > 0.0, 1.0, -1.0)))
        return rng, drawn

    def minimum(self, x: Real, y: Real, start: Real, basis: Real) -> Real:
        """Take Newton steps, halved until the loss falls."""

        def value(w: Real) -> float:
            return float(np.logaddexp(0.0, -y * (x @ w)).mean() + 0.5 * self.l2 * w @ w)

        w = start
        for _ in range(100):
            chance = 1.0 / (1.0 + np.exp(y * (x @ w)))
            gradient = self.l2 * w - (y * chance) @ x / len(y)
            curvature = (x * (chance * (1.0 - chance))[:, None]).T @ x / len(y)
            curvature += self.l2 * np.eye(len(w))
            step = basis @ np.linalg.solve(basis.T @ curvature @ basis, basis.T @ gradient)
            length = 1.0
            while value(w - length * step) > value(w) and length > 1e-6:
                length /= 2.0
            w = w - length * step
        return w
