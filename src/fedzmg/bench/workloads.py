"""Workloads of the shape of real tasks, on random data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import nn

from fedzmg.models.networks import CharGRU, cifar100_cnn, emnist_cnn, mlp
from fedzmg.tasks.real import token_ids
from fedzmg.tasks.task import Task, unit_pixels


def _images(
    name: str, model: nn.Module, clients: int, each: int, shape: tuple[int, ...], classes: int
) -> Task:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, len(x))
    return Task.from_arrays(
        model, x, y, np.repeat(np.arange(clients), each), test=(x[:1000], y[:1000]),
        name=name, prepare=unit_pixels, init="keras",
        cohort=10, batch_size=16, epochs=4, straddle=True,
    )  # fmt: skip


def _text(name: str, sizes: npt.NDArray[np.int64], rng: np.random.Generator) -> Task:
    text = rng.integers(0, 66, (int(sizes.sum()), 101)).astype(np.uint8)
    x, y = text[:, :-1], text[:, 1:].astype(np.int64)
    return Task.from_arrays(
        CharGRU(66, 256, 1024), x, y, np.repeat(np.arange(len(sizes)), sizes),
        test=(x[:64], y[:64]), name=name, prepare=token_ids, init="keras",
        cohort=10, batch_size=8, epochs=4, keep_partial=False,
    )  # fmt: skip


def cifar100(clients: int = 500) -> Task:
    """Build the paper's CIFAR-100: 100 images a client, 25 steps of 16."""
    return _images("cifar100", cifar100_cnn(), clients, 100, (3, 32, 32), 100)


def emnist62(clients: int = 340) -> Task:
    """Build the paper's EMNIST: 200 images a client, 50 steps of 16."""
    return _images("emnist62", emnist_cnn(), clients, 200, (28, 28), 62)


def shakespeare(clients: int = 100) -> Task:
    """Build the paper's Shakespeare: 48 sequences of 100 characters a client, 24 steps of 8."""
    return _text("shakespeare", np.full(clients, 48), np.random.default_rng(0))


def ragged_text(clients: int = 100) -> Task:
    """Build roles whose volumes differ by two orders of magnitude."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(8, np.exp(rng.normal(3.0, 1.2, clients)).astype(int))
    return _text("ragged-text", sizes, rng)


def small_mlp(clients: int = 100) -> Task:
    """Build a 54,000-parameter network on 40 examples a client, for a laptop's CPU."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 40, 784)).astype(np.float32)
    y = rng.integers(0, 10, len(x))
    return Task.from_arrays(
        mlp(784, 64, 48, outputs=10), x, y, np.repeat(np.arange(clients), 40),
        test=(x[:200], y[:200]), name="mlp", cohort=10, batch_size=20, epochs=4,
    )  # fmt: skip


WORKLOADS: dict[str, Callable[..., Task]] = {
    "mlp": small_mlp, "cifar100": cifar100, "emnist62": emnist62, "shakespeare": shakespeare,
    "ragged-text": ragged_text,
}  # fmt: skip
"""Builders by name."""
