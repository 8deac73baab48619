"""Workloads of the shape of real tasks, on random data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import nn

from fedzmg.models.networks import CharGRU, cifar100_cnn, emnist_cnn, mlp
from fedzmg.tasks.real import token_ids
from fedzmg.tasks.task import Task, unit_pixels


def _images(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, each: int,
    *, clients: int,
) -> Task:  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, len(x))
    return Task.from_arrays(
        model(), x, y, np.repeat(np.arange(clients), each), test=(x[:1000], y[:1000]),
        name=name, prepare=unit_pixels, init="keras",
        cohort=10, batch_size=16, epochs=4, straddle=True,
    )  # fmt: skip


def _text(name: str, ragged: bool, *, clients: int = 100) -> Task:
    rng = np.random.default_rng(0)
    sizes = np.full(clients, 48)
    if ragged:
        sizes = np.maximum(8, np.exp(rng.normal(3.0, 1.2, clients)).astype(int))
    text = rng.integers(0, 66, (int(sizes.sum()), 101)).astype(np.uint8)
    x, y = text[:, :-1], text[:, 1:].astype(np.int64)
    return Task.from_arrays(
        CharGRU(66, 256, 1024), x, y, np.repeat(np.arange(clients), sizes),
        test=(x[:64], y[:64]), name=name, prepare=token_ids, init="keras",
        cohort=10, batch_size=8, epochs=4, keep_partial=False,
    )  # fmt: skip


def _vectors(*, clients: int = 100) -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * 40, 784)).astype(np.float32)
    y = rng.integers(0, 10, len(x))
    return Task.from_arrays(
        mlp(784, 64, 48, outputs=10), x, y, np.repeat(np.arange(clients), 40),
        test=(x[:200], y[:200]), name="mlp", cohort=10, batch_size=20, epochs=4,
    )  # fmt: skip


WORKLOADS: dict[str, Callable[..., Task]] = {
    # 54,000 parameters, for a laptop's CPU.
    "mlp": _vectors,
    # The paper's models, with 25, 50 and 24 steps a client.
    "cifar100": partial(_images, "cifar100", cifar100_cnn, (3, 32, 32), 100, 100, clients=500),
    "emnist62": partial(_images, "emnist62", emnist_cnn, (28, 28), 62, 200, clients=340),
    "shakespeare": partial(_text, "shakespeare", False),
    # Volumes of roles differ by two orders of magnitude.
    "ragged-text": partial(_text, "ragged-text", True),
}
"""Builders by name; all take a number of ``clients``."""
