"""Results of a trial: a record per round, metrics on single clients, and the trained model."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedzmg.data.federated import Examples
from fedzmg.engine.choose import EngineChoice
from fedzmg.evaluation import evaluate_by_owner
from fedzmg.models.batch_norm import forget_statistics
from fedzmg.models.copies import module_to
from fedzmg.models.gradients import real_view
from fedzmg.models.layers import settle_spectral_norms
from fedzmg.models.objective import Objective
from fedzmg.seeds import stream
from fedzmg.simulation.trial import Trial
from fedzmg.storage.client_metrics import ClientMetrics, Part
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

MOST_CLIENTS = 10_000  # size of the sample of a larger population
SHARE_OF_TRAINING = 3  # examples used in training per example evaluated, at least
FEW_EXAMPLES = 2_000  # examples evaluated even for a very short training


class Watched(NamedTuple):
    """Clients to evaluate, and the positions of their examples."""

    part: Part
    population: int
    clients: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]  # positions of their examples, client after client

    @classmethod
    def of(cls, task: Task, *, everyone: bool = False) -> "Watched":
        """Choose the clients to evaluate: all with examples, or a sample for a short training."""
        owners = task.test_owners
        part: Part
        if owners is None:
            part, order, counts = "training", None, task.train.counts
        else:
            # Examples without a training client have a negative owner.
            known = np.flatnonzero(owners >= 0)
            order = known[np.argsort(owners[known], kind="stable")]
            part, counts = "test", np.bincount(owners[known], minlength=len(task.train))
        chosen = holders = np.flatnonzero(counts)
        if not everyone:  # a sample, whose evaluation costs little beside the training
            steps = task.protocol.rounds * task.protocol.cohort * task.protocol.epochs
            affordable = int(steps * float(task.train.counts.mean())) // SHARE_OF_TRAINING
            drawn = stream(0, "probe", "clients").permutation(holders)
            most = max(FEW_EXAMPLES, affordable)
            fit = int(np.searchsorted(np.cumsum(counts[drawn]), most, side="right"))
            chosen = np.sort(drawn[: min(max(fit, 1), MOST_CLIENTS)])
        among = np.isin(np.arange(len(counts)), chosen)
        positions = np.flatnonzero(np.repeat(among, counts))
        if order is not None:
            positions = order[positions]
        return cls(part, len(holders), chosen, counts[chosen], positions)


def measure(
    task: Task, watched: Watched, params: Tree, data: Examples, objective: Objective, round_: int
) -> list[ClientMetrics]:
    """Evaluate stacked models on chosen clients, without an effect on the training."""
    device = next(iter(params.values())).device
    owned = watched.positions, watched.counts
    positions, counts = (torch.from_numpy(array).to(device) for array in owned)
    goal = objective, task.metric, task.prepare
    chunk, found = task.examples_at_once, None
    while found is None:
        try:
            found = evaluate_by_owner(params, data, positions, counts, *goal, chunk=chunk)
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
            chunk //= 2
            torch.cuda.empty_cache()
    known = round_, watched.part, watched.population, watched.clients, watched.counts
    columns = np.ascontiguousarray(found.cpu().numpy().transpose(0, 2, 1))
    return [ClientMetrics(*known, metric=metric, loss=loss) for loss, metric in columns]


class Record(NamedTuple):
    """Results of one trial's round; ``round`` counts from 1."""

    round: int
    clients: int
    dropped: int  # uploads rejected: not finite, or an outlier under ``federation.guard``
    steps: int
    train_loss: float
    bytes_down: int  # arrays sent to the cohort in this round
    bytes_up: int  # arrays received from it
    bytes_up_bound: int  # lower bound: whole numbers with as few bits as they need
    scalar_bytes_down: int
    scalar_bytes_up: int  # steps, rounds, losses, learning rates and counts, apart from the arrays
    bytes_kept: int  # bytes that each client keeps until it is sampled again
    total_bytes_down: int  # arrays and scalars of all rounds so far
    total_bytes_up: int
    seconds: float
    loss: float | None = None  # evaluation loss; None in rounds without evaluation
    metric: float | None = None
    diverged: bool = False
    client_loss: tuple[float, ...] | None = None
    """Training losses of merged clients: minimum, 10 %, median, 90 %, maximum; None: no client."""
    rejected: tuple[tuple[str, float], ...] = ()
    """Clients whose uploads were rejected, each with the norm of its update over the cohort's
    median, which is infinite if the update was not finite. The 50 largest of more; ``dropped``
    counts all. Empty once the trial has diverged."""
    flagged: tuple[tuple[str, float], ...] = ()
    """Clients whose uploads were merged though they were outliers, in the same way."""

    def line(self) -> dict[str, Any]:
        """Return the line of a log, without empty lists of clients."""
        return {k: v for k, v in self._asdict().items() if v or k not in ("rejected", "flagged")}


@dataclass(frozen=True)
class History:
    """One trial's curve and its trained model."""

    task: Task
    trial: Trial
    records: tuple[Record, ...]
    params: Tree
    clients: tuple[ClientMetrics, ...] = ()  # metrics on single clients by round
    engine: EngineChoice | None = None  # path of the training, and the reason for it

    def __repr__(self) -> str:
        name, metrics = self.trial.name or self.trial.algorithm.name, self.metrics
        parts = [f"{len(self.records)} of {self.task.protocol.rounds} rounds"]
        if metrics:
            parts.append(f"{self.task.metric.name} {metrics[-1]:.4g} at the end")
        if self.diverged is not None:
            parts.append(f"diverged in round {self.diverged}")
        if self.engine is not None and self.engine.fallback:
            parts.append(self.engine.reason)
        about = f"{name} on {self.task.name!r}, seed {self.trial.seed}"
        return f"<History of {about}: {', '.join(parts)}>"

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

    def why_diverged(self) -> str:
        """Say what to change: the learning rate, unless the model fails on few test examples."""
        each = np.arange(self.task.test.size)
        watched = Watched("test", len(each), each, np.ones_like(each), each)
        if all(bool(leaf.isfinite().all()) for leaf in self.params.values()):
            failed = np.flatnonzero(~np.isfinite(self._measured(watched).loss))
            if 0 < len(failed) < len(each) / 2:
                return f"the loss of test example {failed[0]} is not finite"
        return "try a smaller client.lr"

    def client_metrics(self) -> ClientMetrics:
        """Return the final model's metric on each client's own examples; evaluate it if needed."""
        if self.clients:
            return self.clients[-1]
        return self._measured(Watched.of(self.task, everyone=True))

    def _measured(self, watched: Watched) -> ClientMetrics:
        task = self.task
        params = self.params.map(lambda leaf: leaf[None].cpu())
        dtype = next(iter(params.values())).dtype
        cpu = torch.device("cpu")
        data = task.test if watched.part == "test" else task.train.examples
        data, objective = data.to(cpu, dtype), task.objective.to(cpu, dtype)
        round_ = self.records[-1].round if self.records else 0
        return measure(task, watched, params, data, objective, round_)[0]

    def model(self) -> nn.Module:
        """Return the trained model: a module in eval mode, in the precision it was trained in."""
        dtype = next(iter(self.params.values())).dtype
        module = module_to(self.task.model.source, torch.device("cpu"), dtype)
        if self.task.model.batch_norm == "batch":
            forget_statistics(module)
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, value in self.params.items():
                real_view(named[name]).copy_(value)
        settle_spectral_norms(module)
        return module.eval()
