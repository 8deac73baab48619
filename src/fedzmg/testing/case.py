"""Tiny federations for the conformance suite, and trainings that properties share."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.data.federated import Examples
from fedzmg.data.plan import ClientBatch
from fedzmg.errors import InputError
from fedzmg.models.initial import initial_params
from fedzmg.simulation import RoundPlanner, Simulation, Trial
from fedzmg.simulation.trial import PackedRule, packed_rules
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree, leaves, named_leaves, stack

CPU = torch.device("cpu")
PACK = 2  # trials that train side by side
SIZES = (3, 5, 1, 8, 6, 4, 2)  # client 2 has less than a batch: no step without partial ones
TOLERANCE = 1e-9  # largest difference between engines after two rounds, in float64


class _Network(nn.Module):
    """A convolution, dropout and a dense layer: kernels of two ranks, biases, randomness."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        # BatchNorm takes a bias back: its gradient is noise, which some rules take the sign of.
        self.conv = nn.Conv1d(1, 3, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.drop = nn.Dropout(0.3)
        self.dense = nn.Linear(3 * 6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.dense(self.drop(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1)))


@cache
def task(sizes: tuple[int, ...] = SIZES, *, norm: bool = False, **protocol: object) -> Task:
    """Make a federation of clients of some sizes, with random labels; or with batch norm."""
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    x, y = rng.normal(size=(len(owner), 6)) + 0.5, rng.integers(0, 4, len(owner))
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 2, "cohort": 4, "rounds": 3, **protocol}
    return Task.from_arrays(_Network(norm=norm), x, y, owner, test=(x, y), **settings)


def with_inputs(problem: Task, change: Callable[[Tensor], Tensor], client: int | None) -> Task:
    """Change the inputs of one client, or of all."""
    x = problem.train.examples.x.clone()
    part = slice(None) if client is None else slice(*problem.train.offsets[client : client + 2])
    x[part] = change(x[part])
    examples = Examples(x, problem.train.examples.y)
    return replace(problem, train=replace(problem.train, examples=examples))


class ChangedPlanner(RoundPlanner):
    """Planner that changes the batches of every round."""

    def __init__(self, problem: Task, algorithm: Algorithm, change: Callable[..., Any]) -> None:
        super().__init__(problem, range(PACK), None, algorithm.client.extra_epochs)
        self._change = change

    def batches(self, round_: int, chosen: range | None = None) -> list[ClientBatch]:
        changed: list[ClientBatch] = self._change(super().batches(round_))
        return changed


class Run(NamedTuple):
    """Everything that properties compare of some rounds."""

    snapshots: list[Any]
    records: list[list[Any]]
    kept: list[Any]  # checkpoints after one round


def run_of(sim: Simulation, rounds: int = 2) -> Run:
    """Train some rounds."""
    found = Run([], [], [])
    for done in range(1, rounds + 1):
        report = sim.run_round()
        found.records.append([r._replace(seconds=0) for r in report.records])
        found.snapshots.append(sim.snapshot)
        if done == 1:
            found.kept.extend(sim.checkpoint(i) for i in range(len(report.records)))
    return found


class Case:
    """One algorithm under test, with trainings that several properties need."""

    def __init__(self, algorithm: Algorithm | AlgorithmInfo, *, norm: bool = False) -> None:
        self.info = algorithm if isinstance(algorithm, AlgorithmInfo) else None
        """Declared traffic and state; None: not declared."""
        self.algorithm = algorithm if isinstance(algorithm, Algorithm) else algorithm.algorithm
        self._norm = norm or "batch_norm" in self.algorithm.parts.personal
        self._runs: dict[str, Run] = {}

    def task(self, *sizes: tuple[int, ...], **protocol: object) -> Task:
        """Make a federation; with BatchNorm if the algorithm needs it."""
        return task(*sizes, norm=self._norm, **protocol)

    def trials(self) -> list[Trial]:
        """Return a pack that differs in seeds and in every number."""
        return [Trial(self._changed(i), seed=i) for i in range(PACK)]

    def _changed(self, index: int) -> Algorithm:
        algorithm = self.algorithm
        rates = {"client.lr": 0.02 * (1 + index), "server.lr": 0.5 / (1 + index)}
        for key, (rule, field) in self.algorithm.fields().items():
            value = getattr(rule, field.name)
            if "number" not in field.metadata or value is None:
                continue
            others = [value * (1 - 0.05 * index), value * (1 + 0.05 * index), value + 0.05 * index]
            for other in [rates[key]] if key in rates else others:
                with contextlib.suppress(InputError):  # out of its range
                    changed = algorithm.with_options({key: other})
                    if index == 0 or changed != algorithm:
                        algorithm = changed
                        break
        return algorithm

    def simulation(
        self, engine: Any = "vectorized", problem: Any = None, chosen: Any = (), **options: Any
    ) -> Simulation:
        """Begin to train the pack, or chosen trials of it."""
        options |= {"rounds": 4, "device": CPU, "dtype": torch.float64, "engine": engine}
        return Simulation(problem or self.task(), chosen or self.trials(), **options)

    def run(self, engine: str) -> Run:
        """Train two rounds of the pack; only once for all properties."""
        if engine not in self._runs:
            self._runs[engine] = run_of(self.simulation(engine))
        return self._runs[engine]

    def packed_rules(self) -> tuple[list[PackedRule], Tree]:
        """Return client rule, server rule and models of the pack, for a dry run."""
        problem, trials = self.task(), self.trials()
        _, *packed = packed_rules(problem, trials, torch.float64, CPU)
        starts = [initial_params(problem.model, problem.init, trial.seed) for trial in trials]
        return packed, stack(starts).map(Tensor.double)


def distance(one: Any, two: Any) -> tuple[float, str]:
    """Return the largest difference between tensors of equal structure, and its leaf's name."""
    pairs = zip(named_leaves(one).items(), leaves(two), strict=True)
    # NaN is infinitely far from everything.
    gaps = {name: (a.double() - b.double()).abs().nan_to_num(torch.inf) for (name, a), b in pairs}
    return max((float(gap.max()), name) for name, gap in gaps.items())
