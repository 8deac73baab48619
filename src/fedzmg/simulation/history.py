"""What is known of a trial's past: a line per round, the model, and where to go on."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedzmg.simulation.clients import ClientMetrics, Watched, measure
from fedzmg.simulation.trial import Trial
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree


class Record(NamedTuple):
    """What one trial's round came to; ``round`` counts from 1."""

    round: int
    clients: int
    dropped: int
    """Uploads refused because they were not finite."""
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
    """Steps, rounds, losses, rates and example counts, apart from the arrays."""
    bytes_kept: int
    """What each client that took part keeps until it is sampled again."""
    total_bytes_down: int
    """Arrays and scalars of all rounds so far."""
    total_bytes_up: int
    seconds: float
    loss: float | None = None
    """Evaluation loss; None in rounds without evaluation."""
    metric: float | None = None
    diverged: bool = False
    client_loss: tuple[float, ...] | None = None
    """Training loss over the clients that were merged: least, 10 %, median, 90 %, most; six digits.
    None if none was."""


@dataclass(frozen=True)
class History:
    """One trial's curve and its trained model."""

    task: Task
    trial: Trial
    records: tuple[Record, ...]
    params: Tree
    clients: tuple[ClientMetrics, ...] = ()
    """How the model did on single clients, in the order of rounds; the last is the end's."""

    def __repr__(self) -> str:
        """How it went, without the rounds and the model."""
        name, metrics = self.trial.name or self.trial.algorithm.name, self.metrics
        told = [f"{len(self.records)} of {self.task.protocol.rounds} rounds"]
        if metrics:
            told.append(f"{self.task.metric.name} {metrics[-1]:.4g} at last")
        if self.diverged is not None:
            told.append(f"diverged in round {self.diverged}")
        return (
            f"<History of {name} on {self.task.name!r}, seed {self.trial.seed}: {', '.join(told)}>"
        )

    @property
    def diverged(self) -> int | None:
        """The round in which the trial diverged, if it did."""
        return next((r.round for r in self.records if r.diverged), None)

    @property
    def rounds(self) -> list[int]:
        """Evaluated rounds, counted from 1."""
        return [r.round for r in self.records if r.metric is not None]

    @property
    def metrics(self) -> list[float]:
        """The metric after each evaluated round."""
        return [r.metric for r in self.records if r.metric is not None]

    def client_metrics(self) -> ClientMetrics:
        """How the model does on each client's own examples in the end, evaluated now if need be."""
        if self.clients:
            return self.clients[-1]
        task, watched = self.task, Watched.of(self.task, everyone=True)
        params = self.params.map(lambda leaf: leaf[None].cpu())
        dtype = next(iter(params.values())).dtype
        objective = replace(task.objective, model=task.model.to(torch.device("cpu"), dtype))
        data = task.test if watched.part == "test" else task.train.examples
        round_ = self.records[-1].round if self.records else 0
        return measure(task, watched, params, data, objective, round_)[0]

    def model(self) -> nn.Module:
        """The trained model: a copy of the task's module with these parameters, in eval mode."""
        module = copy.deepcopy(self.task.model.source)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in self.params.items():
                named[name].copy_(value)
        return module.eval()


class Checkpoint(NamedTuple):
    """One trial's position: everything a later round depends on, as named tensors."""

    round: int
    tensors: dict[str, Tensor]

    def params(self) -> Tree:
        """The global model at this position."""
        prefix, suffix = "model.params['", "']"
        return Tree(
            {
                name.removeprefix(prefix).removesuffix(suffix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
        )
