"""What is measured: work of the shape of a task, on random data, so that no data set is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedzmg.models.networks import CharGRU, mlp
from fedzmg.models.paper import cifar100_cnn, emnist_cnn
from fedzmg.tasks.task import Task, unit_pixels
from fedzmg.tasks.text import token_ids


def cifar100(clients: int = 500) -> Task:
    """The paper's CIFAR-100: 100 images a client, 25 steps of 16."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * 100, 3, 32, 32), dtype=np.uint8)
    y = rng.integers(0, 100, len(x))
    return Task.from_arrays(
        cifar100_cnn(), x, y, np.repeat(np.arange(clients), 100), test=(x[:1000], y[:1000]),
        name="cifar100", prepare=unit_pixels, init="keras",
        cohort=10, batch_size=16, epochs=4, straddle=True,
    )  # fmt: skip


def emnist62(clients: int = 340) -> Task:
    """The paper's EMNIST: 200 images a client, 50 steps of 16."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * 200, 28, 28), dtype=np.uint8)
    y = rng.integers(0, 62, len(x))
    return Task.from_arrays(
        emnist_cnn(), x, y, np.repeat(np.arange(clients), 200), test=(x[:1000], y[:1000]),
        name="emnist62", prepare=unit_pixels, init="keras",
        cohort=10, batch_size=16, epochs=4, straddle=True,
    )  # fmt: skip


def shakespeare(clients: int = 100) -> Task:
    """The paper's Shakespeare: 48 sequences of 100 characters a client, 24 steps of 8."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 66, (clients * 48, 101)).astype(np.uint8)
    x, y = text[:, :-1], text[:, 1:].astype(np.int64)
    return Task.from_arrays(
        CharGRU(66, 256, 1024), x, y, np.repeat(np.arange(clients), 48), test=(x[:64], y[:64]),
        name="shakespeare", prepare=token_ids, init="keras",
        cohort=10, batch_size=8, epochs=4, keep_partial=False,
    )  # fmt: skip


def ragged_text(clients: int = 100) -> Task:
    """Shakespeare's roles as they are: volumes that differ by two orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(8, np.exp(rng.normal(3.0, 1.2, clients)).astype(int))
    text = rng.integers(0, 66, (int(sizes.sum()), 101)).astype(np.uint8)
    x, y = text[:, :-1], text[:, 1:].astype(np.int64)
    return Task.from_arrays(
        CharGRU(66, 256, 1024), x, y, np.repeat(np.arange(clients), sizes), test=(x[:64], y[:64]),
        name="ragged-text", prepare=token_ids, init="keras",
        cohort=10, batch_size=8, epochs=4, keep_partial=False,
    )  # fmt: skip


def small_mlp(clients: int = 100) -> Task:
    """A 54,000-parameter network on 40 examples a client, for a laptop's processor."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 40, 784)).astype(np.float32)
    y = rng.integers(0, 10, len(x))
    return Task.from_arrays(
        mlp(784, 64, 48, outputs=10), x, y, np.repeat(np.arange(clients), 40),
        test=(x[:200], y[:200]), name="mlp", cohort=10, batch_size=20, epochs=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One row of the table of workloads."""

    build: Callable[..., Task]
    summary: str


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(small_mlp, "54,000-parameter network, 8 steps of 20"),
    "cifar100": Workload(cifar100, "the paper's CNN, 25 steps of 16"),
    "emnist62": Workload(emnist62, "the paper's CNN, 50 steps of 16"),
    "shakespeare": Workload(shakespeare, "the paper's GRU, 24 steps of 8 x 100 characters"),
    "ragged-text": Workload(ragged_text, "the same GRU, roles of very different volume"),
}
