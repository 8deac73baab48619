"""History of a trial: a record per round, and the trained model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from fedzmg.models.functional import module_to
from fedzmg.simulation.clients import ClientMetrics, Watched, measure
from fedzmg.simulation.trial import Trial
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree


class Record(NamedTuple):
    """Results of one trial's round; ``round`` counts from 1."""

    round: int
    clients: int
    dropped: int
    """Uploads rejected because they were not finite."""
    steps: int
    train_loss: float
    bytes_down: int
    """Arrays sent to the cohort in this round."""
    bytes_up: int
    """Arrays received from it."""
    bytes_up_bound: int
    """The same, if whole numbers used no more bits than they need."""
    scalar_bytes_down: int
    scalar_bytes_up: int
    """Steps, rounds, losses, learning rates and example counts, apart from the arrays."""
    bytes_kept: int
    """Bytes that each client keeps until it is sampled again."""
    total_bytes_down: int
    """Arrays and scalars of all rounds so far."""
    total_bytes_up: int
    seconds: float
    loss: float | None = None
    """Evaluation loss; None in rounds without evaluation."""
    metric: float | None = None
    diverged: bool = False
    client_loss: tuple[float, ...] | None = None
    """Training loss of the merged clients: minimum, 10 %, median, 90 %, maximum; six digits. None
    without clients."""


@dataclass(frozen=True)
class History:
    """One trial's curve and its trained model."""

    task: Task
    trial: Trial
    records: tuple[Record, ...]
    params: Tree
    clients: tuple[ClientMetrics, ...] = ()
    """Metrics on single clients, in the order of rounds; the last is of the final model."""

    def __repr__(self) -> str:
        name, metrics = self.trial.name or self.trial.algorithm.name, self.metrics
        parts = [f"{len(self.records)} of {self.task.protocol.rounds} rounds"]
        if metrics:
            parts.append(f"{self.task.metric.name} {metrics[-1]:.4g} at the end")
        if self.diverged is not None:
            parts.append(f"diverged in round {self.diverged}")
        return (
            f"<History of {name} on {self.task.name!r}, seed {self.trial.seed}: {', '.join(parts)}>"
        )

    @property
    def diverged(self) -> int | None:
        """Round in which the trial diverged; None if it did not."""
        return next((r.round for r in self.records if r.diverged), None)

    @property
    def rounds(self) -> list[int]:
        """Evaluated rounds, counted from 1."""
        return [r.round for r in self.records if r.metric is not None]

    @property
    def metrics(self) -> list[float]:
        """Metric after each evaluated round."""
        return [r.metric for r in self.records if r.metric is not None]

    def client_metrics(self) -> ClientMetrics:
        """Return the final model's metric on each client's own examples; evaluate it if needed."""
        if self.clients:
            return self.clients[-1]
        task, watched = self.task, Watched.of(self.task, everyone=True)
        params = self.params.map(lambda leaf: leaf[None].cpu())
        dtype = next(iter(params.values())).dtype
        objective = replace(task.objective, model=task.model.to(torch.device("cpu"), dtype))
        data = task.test if watched.part == "test" else task.train.examples
        data = data.to(torch.device("cpu"), dtype)
        round_ = self.records[-1].round if self.records else 0
        return measure(task, watched, params, data, objective, round_)[0]

    def model(self) -> nn.Module:
        """Return the trained model: a module in eval mode, in the precision it was trained in."""
        dtype = next(iter(self.params.values())).dtype
        module = module_to(self.task.model.source, torch.device("cpu"), dtype)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.params.items():
                named[name].copy_(value)
        return module.eval()
