"""How a model does on the examples of every client, so that an average hides nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedzmg.data.federated import Examples
from fedzmg.evaluation import evaluate_by_owner
from fedzmg.models.objective import Objective
from fedzmg.seeds import stream
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

MOST_CLIENTS = 10_000
"""Of a larger population a sample is looked at."""
SHARE_OF_TRAINING = 3
"""An evaluation looks at no more than one in so many of the examples that training does."""
FEW_EXAMPLES = 2_000
"""What is looked at however short the training is."""

Part = Literal["test", "training"]


@dataclass(frozen=True, eq=False)
class ClientMetrics:
    """Metric and loss of one model on each client's own examples."""

    round: int
    """Rounds trained so far."""
    part: Part
    """Which of their examples: those kept for tests, where the task has them by client."""
    population: int
    """Clients that hold such examples; more than are listed where these are a sample."""
    clients: npt.NDArray[np.int64]
    """Positions in the task's clients, ascending."""
    examples: npt.NDArray[np.int64]
    metric: npt.NDArray[np.float64]
    loss: npt.NDArray[np.float64]


class Watched(NamedTuple):
    """Clients to look at, and where their examples lie."""

    part: Part
    population: int
    clients: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    """Of their examples, client after client."""

    @classmethod
    def of(cls, task: Task, *, everyone: bool = False) -> Watched:
        """The clients that a task's runs are judged by: the same for every algorithm and seed.

        Who holds nothing is left out. Of many clients, or of many examples beside a short
        training, a sample is drawn; a longer training only adds to it.

        Args:
            task: data and protocol.
            everyone: whether to look at all of them, whatever it costs.
        """
        owners = task.test_owners
        part: Part
        if owners is None:
            part, order, counts = "training", None, task.train.counts
        else:
            # Examples of nobody who trains carry a negative number.
            known = np.flatnonzero(owners >= 0)
            order = known[np.argsort(owners[known], kind="stable")]
            part, counts = "test", np.bincount(owners[known], minlength=len(task.train))
        starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        holders = np.flatnonzero(counts)
        chosen = holders if everyone else _sample(holders, counts, _affordable(task))
        held = counts[chosen]
        # Positions within each client, moved to where the client begins.
        within = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
        places = np.repeat(starts[chosen], held) + within
        if order is not None:
            places = order[places]
        return cls(part, len(holders), chosen, held, places)


def _affordable(task: Task) -> int:
    """Examples that may be looked at, so that it costs little beside the training."""
    protocol = task.protocol
    trained = protocol.rounds * protocol.cohort * protocol.epochs * float(task.train.counts.mean())
    return max(FEW_EXAMPLES, int(trained) // SHARE_OF_TRAINING)


def _sample(
    holders: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], affordable: int
) -> npt.NDArray[np.int64]:
    order = stream(0, "probe", "clients").permutation(holders)
    fit = int(np.searchsorted(np.cumsum(counts[order]), affordable, side="right"))
    return np.sort(order[: min(max(fit, 1), MOST_CLIENTS)])


def measure(
    task: Task,
    watched: Watched,
    params: Tree,
    data: Examples,
    objective: Objective,
    round_: int,
) -> list[ClientMetrics]:
    """Evaluate stacked models on watched clients; nothing of a training depends on it.

    Args:
        task: metric and preparation.
        watched: whom to look at.
        params: models, stacked on the first axis.
        data: the part of the examples that ``watched`` speaks of, where the models are.
        objective: model and loss.
        round_: rounds trained so far.
    """
    device = next(iter(params.values())).device
    places, counts = (torch.from_numpy(a).to(device) for a in (watched.places, watched.counts))
    found = _within_memory(params, data, places, counts, objective, task).cpu().numpy()
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
        for values in found
    ]


def _within_memory(
    params: Tree, data: Examples, places: Tensor, counts: Tensor, objective: Objective, task: Task
) -> Tensor:
    """Evaluate in parts that fit, without asking the training to make room."""
    chunk = 500
    while True:
        try:
            return evaluate_by_owner(
                params, data, places, counts, objective, task.metric, task.prepare, chunk=chunk
            )
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
            chunk //= 2
            torch.cuda.empty_cache()
