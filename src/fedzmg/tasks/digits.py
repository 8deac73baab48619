"""``digits``: real handwritten digits on clients that each know few of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedzmg.data.embedded import load_digits
from fedzmg.data.federated import FederatedData, examples
from fedzmg.data.partition import dirichlet
from fedzmg.models.functional import FunctionalModel
from fedzmg.models.networks import digits_cnn
from fedzmg.tasks.preset import Preset, decision
from fedzmg.tasks.task import Protocol, Task, unit_pixels
from fedzmg.tasks.tuned import tuned

CLIENTS = 160


@dataclass(frozen=True)
class Digits(Preset):
    """160 clients of 50 images each, labels skewed by Dirichlet(0.1); pixels 1.0 = background.

    Half of the test images choose learning rates, the other half report results.
    """

    alpha: float = decision(0.1, "skew of the labels by Dirichlet(alpha): small is strong")
    partition_seed: int = decision(0, "seed by which images are dealt out")

    @property
    def clients(self) -> int:
        return CLIENTS

    @property
    def protocol(self) -> Protocol:
        return Protocol(rounds=50, cohort=5, batch_size=10, epochs=2, eval_every=2, threshold=0.8)

    def network(self) -> nn.Module:
        return digits_cnn()

    def build(self) -> Task:
        data = load_digits()
        owners = dirichlet(data.train_y, CLIENTS, alpha=self.alpha, seed=self.partition_seed)
        return Task(
            name=self.name,
            model=FunctionalModel(self.network()),
            train=FederatedData.from_arrays(data.train_x, data.train_y, owners),
            tune=examples(data.test_x[0::2], data.test_y[0::2]),
            test=examples(data.test_x[1::2], data.test_y[1::2]),
            prepare=unit_pixels,
            init="keras",
            protocol=self.protocol,
            options=tuned(self.name),
            # Only what is not as usual: runs from before there were fields can go on.
            preset={o.name: o.value for o in self.decisions() if o.value != o.default},
        )
