"""Metrics of a model on the examples of single clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedzmg.data.federated import Examples
from fedzmg.evaluation import evaluate_by_owner
from fedzmg.models.objective import Objective
from fedzmg.seeds import stream
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

MOST_CLIENTS = 10_000
"""Size of the sample of a larger population."""
SHARE_OF_TRAINING = 3
"""Examples used in training per example evaluated, at least."""
FEW_EXAMPLES = 2_000
"""Examples evaluated however short the training is."""

Part = Literal["test", "training"]


@dataclass(frozen=True, eq=False)
class ClientMetrics:
    """Metric and loss of one model on each client's own examples."""

    round: int
    """Rounds trained so far."""
    part: Part
    """Evaluated examples: test examples if the task has them by client."""
    population: int
    """Clients that hold such examples; ``clients`` may be a sample of them."""
    clients: npt.NDArray[np.int64]
    """Positions in the task's clients, ascending."""
    examples: npt.NDArray[np.int64]
    metric: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]


class Watched(NamedTuple):
    """Clients to evaluate, and the positions of their examples."""

    part: Part
    population: int
    clients: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    """Positions of their examples, client after client."""

    @classmethod
    def of(cls, task: Task, *, everyone: bool = False) -> Watched:
        """Choose the clients to evaluate: the same for every algorithm and seed.

        Clients without examples are left out. A large population, or one with many examples for a
        short training, is sampled; a longer training only adds to the sample.
        """
        owners = task.test_owners
        part: Part
        if owners is None:
            part, order, counts = "training", None, task.train.counts
        else:
            # Examples without a training client have a negative owner.
            known = np.flatnonzero(owners >= 0)
            order = known[np.argsort(owners[known], kind="stable")]
            part, counts = "test", np.bincount(owners[known], minlength=len(task.train))
        starts = np.cumsum(counts) - counts
        holders = np.flatnonzero(counts)
        chosen = holders if everyone else _sample(task, holders, counts)
        held = counts[chosen]
        # Positions within each client, moved to where the client begins.
        within = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
        positions = np.repeat(starts[chosen], held) + within
        if order is not None:
            positions = order[positions]
        return cls(part, len(holders), chosen, held, positions)


def _sample(
    task: Task, holders: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Sample clients whose evaluation costs little beside the training."""
    protocol = task.protocol
    trained = protocol.rounds * protocol.cohort * protocol.epochs * float(task.train.counts.mean())
    affordable = max(FEW_EXAMPLES, int(trained) // SHARE_OF_TRAINING)
    order = stream(0, "probe", "clients").permutation(holders)
    fit = int(np.searchsorted(np.cumsum(counts[order]), affordable, side="right"))
    return np.sort(order[: min(max(fit, 1), MOST_CLIENTS)])


def measure(
    task: Task, watched: Watched, params: Tree, data: Examples, objective: Objective, round_: int
) -> list[ClientMetrics]:
    """Evaluate stacked models on chosen clients, without an effect on the training."""
    device = next(iter(params.values())).device
    positions, counts = (
        torch.from_numpy(a).to(device) for a in (watched.positions, watched.counts)
    )
    chunk, found = 500, None
    while found is None:
        try:
            found = evaluate_by_owner(
                params, data, positions, counts, objective, task.metric, task.prepare, chunk=chunk
            )
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
            chunk //= 2
            torch.cuda.empty_cache()
    return [
        ClientMetrics(
            round=round_,
            part=watched.part,
            population=watched.population,
            clients=watched.clients,
            examples=watched.counts,
            metric=np.ascontiguousarray(values[:, 1]),
            loss=np.ascontiguousarray(values[:, 0]),
        )
        for values in found.cpu().numpy()
    ]
