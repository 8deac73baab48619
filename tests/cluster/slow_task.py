"""A plugin: a federation whose rounds take long enough to kill their process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import nn

from fedzmg import Task
from fedzmg.data.federated import examples

SECONDS = 0.01


def pause(inputs: Any, dtype: Any) -> Any:
    """Convert inputs slowly."""
    time.sleep(SECONDS)
    return inputs.to(dtype)


def fail(inputs: Any, dtype: Any) -> Any:
    """Raise in the fifth call of a worker, after the checks of the task."""
    fail.calls = getattr(fail, "calls", 0) + 1  # type: ignore[attr-defined]
    if fail.calls > 60:  # type: ignore[attr-defined]
        raise ZeroDivisionError("mine")
    return inputs.to(dtype)


def made(name: str, prepare: Any) -> Task:
    """Make a task of six clients."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), [4, 9, 6, 3, 8, 5])
    x, y = rng.normal(size=(len(owner), 5)).astype("float32"), rng.integers(0, 3, len(owner))
    tune = examples(x[0::2], y[0::2])
    return Task.from_arrays(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), x, y, owner,
        test=(x[1::2], y[1::2]), tune=(tune.x, tune.y), name=name, prepare=prepare,
        cohort=3, batch_size=5, epochs=1, init="torch",
    )  # fmt: skip


TASKS = (made("slow", pause), made("failing", fail))
