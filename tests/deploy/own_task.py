"""A small task of three clients, as a user would write it for a federation."""

import numpy as np
from torch import nn

from fedzmg import Task


def task(*layers: nn.Module) -> Task:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = rng.normal(size=(60, 4)).astype(np.float32) + np.eye(4, dtype=np.float32)[y]
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 3))
    owners = np.repeat([0, 1, 2], [10, 20, 30])
    return Task.from_arrays(
        model, x, y, owners, test=(x, y), cohort=2, rounds=4, batch_size=5, epochs=1
    )


def normalized() -> Task:
    return task(nn.BatchNorm1d(8))
