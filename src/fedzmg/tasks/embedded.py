"""``digits`` and ``plays``: small real tasks whose data ships with the package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from torch import nn

from fedzmg.data.embedded import load_digits, load_plays
from fedzmg.data.federated import Examples, FederatedData, examples
from fedzmg.data.partition import dirichlet
from fedzmg.data.text import VOCABULARY, encode, sequences
from fedzmg.models.networks import CharGRU, digits_cnn
from fedzmg.tasks.preset import Preset, decision
from fedzmg.tasks.task import Protocol, Task, unit_pixels

LENGTH = 40
TEST_EVERY = 8
"""Every eighth sequence of a role is kept for evaluation."""


@cache
def _digits(clients: int, alpha: float, seed: int) -> tuple[FederatedData, Examples, Examples]:
    """Return training, tuning and test images; partitioning takes half a second."""
    data = load_digits()
    owners = dirichlet(data.train_y, clients, alpha=alpha, seed=seed)
    return (
        FederatedData.from_arrays(data.train_x, data.train_y, owners),
        examples(data.test_x[0::2], data.test_y[0::2]),
        examples(data.test_x[1::2], data.test_y[1::2]),
    )


@cache
def _plays() -> tuple[FederatedData, Examples, Examples]:
    """Return training, tuning and test sequences; cutting them takes half a second."""
    data = load_plays()
    cut = sequences(*encode(data.text, data.offsets), LENGTH)
    counts = np.diff(cut.offsets)
    role = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(role)) - cut.offsets[role]
    used = counts[role] >= TEST_EVERY
    last = position % TEST_EVERY == TEST_EVERY - 1
    train, held = np.flatnonzero(used & ~last), np.flatnonzero(used & last)
    x, y = cut.inputs.astype(np.int64), cut.targets
    # Evaluating every held-out sequence would cost more than training on a small machine.
    tune, test = held[::6], held[3::6]
    return (
        FederatedData.from_arrays(x[train], y[train], [data.roles[i] for i in role[train]]),
        examples(x[tune], y[tune]),
        examples(x[test], y[test]),
    )


@dataclass(frozen=True)
class Digits(Preset):
    """160 clients of 50 images each, labels skewed by Dirichlet(0.1); pixels 1.0 = background.

    Half of the test images choose learning rates, the other half report results.
    """

    alpha: float = decision(0.1, "label skew, Dirichlet(alpha): smaller is stronger")
    partition_seed: int = decision(0, "seed of the partition")
    protocol = Protocol(rounds=50, cohort=5, batch_size=10, epochs=2, eval_every=2, threshold=0.8)

    def network(self) -> nn.Module:
        return digits_cnn()

    def build(self) -> Task:
        data = _digits(self.clients, self.alpha, self.partition_seed)
        # Only changed fields are recorded: names of run directories depend on nothing else.
        preset = {o.name: o.value for o in self.decisions() if o.value != o.default}
        return self.assembled(*data, prepare=unit_pixels, init="keras", preset=preset)


@dataclass(frozen=True)
class Plays(Preset):
    """Roles with at least eight sequences of 40 characters; a GRU of 64 units."""

    protocol = Protocol(rounds=100, cohort=10, batch_size=8, eval_every=5, threshold=0.35)

    def network(self) -> nn.Module:
        return CharGRU(VOCABULARY, 16, 64)

    def build(self) -> Task:
        return self.assembled(*_plays(), init="keras")
