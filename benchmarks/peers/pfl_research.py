"""pfl-research: its simulated backend, its federated averaging, its PyTorch model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from peers.networks import arrays, build, examples, prepare, set_precision, wait
from peers.work import Stopwatch, Work, begin


class Trained(nn.Module):
    """Network with the two methods that pfl calls."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network
        self.steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch of a local step."""
        self.steps += 1
        self.train()
        return F.cross_entropy(self.network(prepare(x)), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Called in the first round, which does not count."""
        self.eval()
        total = F.cross_entropy(self.network(prepare(x)), y, reduction="sum")
        return {"loss": Weighted(total.item(), len(y))}


class Rounds(TrainingProcessCallback):
    """Stops the time of every round."""

    def __init__(self, work: Work, watch: Stopwatch, trained: Trained) -> None:
        self._work, self._watch, self._trained = work, watch, trained

    def on_train_begin(self, *, model: Any) -> Metrics:
        del model
        self._watch.begin()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        del aggregate_metrics, model, central_iteration
        wait(self._work.facts)
        self._watch.end(self._trained.steps, lambda: arrays(self._trained.network))
        self._trained.steps = 0
        self._watch.begin()
        return False, Metrics()


def main() -> None:
    """Train all rounds of the work."""
    work, watch = begin()
    set_precision(work.facts)
    rounds, cohort, steps, size = work.batches.shape
    x, y = examples(work)
    # pfl cuts batches from the front: order a user's data by batch.
    streams = work.batches.reshape(rounds * cohort, steps * size)

    def user(stream: int) -> PyTorchTensorDataset:
        rows = torch.from_numpy(streams[stream]).to(work.facts.device)
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=str(stream))

    trained = Trained(build(work.facts, work.start))
    model = PyTorchModel(
        trained,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(trained.parameters(), lr=1.0),
    )
    users = FederatedDataset(user, itertools.count().__next__)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1,
            train_cohort_size=cohort, val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.facts.lr, local_batch_size=size
        ),
        callbacks=[Rounds(work, watch, trained)],
    )  # fmt: skip
    watch.report(["pfl", "torch"], f"threads: {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
