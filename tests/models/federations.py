"""Tiny federations on which every model must train alike under both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedzmg import Task, Trial, simulate
from fedzmg.models.initial import initial_params

OWNERS = np.repeat(np.arange(3), [5, 2, 3])
"""Ragged clients, so that batches are padded and clients leave the map one by one."""
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-9}


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(len(OWNERS), *shape)).astype(np.float32)


def ids(high: int, *shape: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, high, (len(OWNERS), *shape))


LABELS = ids(3)


def federation(module: nn.Module, x: Any, y: Any = LABELS, **more: Any) -> Task:
    return Task.from_arrays(module, x, y, OWNERS, test=(x, y), cohort=3, batch_size=3, **more)


def assert_engines_agree(
    task: Task, dtype: torch.dtype, engines: tuple[Any, Any] = ("sequential", "vectorized")
) -> None:
    """One round gives the same model by both engines, and another one than it began with."""
    loop, mapped = (
        simulate(task, [Trial.of("fedzmg")], rounds=1, engine=engine, dtype=dtype)[0]
        for engine in engines
    )
    start, moved = initial_params(task.model, task.init, 0), 0.0
    for name, leaf in loop.params.items():
        assert leaf.dtype == dtype
        assert bool(leaf.isfinite().all())
        torch.testing.assert_close(leaf, mapped.params[name], rtol=0, atol=LIMIT[dtype])
        moved = max(moved, float((leaf - start[name]).abs().max()))
    assert moved > 1e-3
