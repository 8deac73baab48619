"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, or your own.

::

    with Tracking(trackers.named("tensorboard"), out) as progress:
        run_study(spec, out, progress=progress)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from fedzmg.errors import InputError, unknown
from fedzmg.trackers.tracking import (
    Ending,
    Make,
    MLflow,
    TensorBoard,
    TrackedRun,
    Tracker,
    Tracking,
    WeightsAndBiases,
    by_point,
    by_seed,
)

__all__ = [
    "TRACKERS",
    "Ending",
    "TrackedRun",
    "Tracker",
    "TrackerInfo",
    "Tracking",
    "by_point",
    "by_seed",
    "named",
]


class TrackerInfo(NamedTuple):
    """Factory and requirements of a tracker."""

    make: Make
    modules: tuple[str, ...]
    """Required modules, installed by the extra of the tracker's name."""


TRACKERS: dict[str, TrackerInfo] = {
    "tensorboard": TrackerInfo(TensorBoard, ("tensorboard",)),
    "mlflow": TrackerInfo(MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "wandb": TrackerInfo(WeightsAndBiases, ("wandb",)),
}


def named(names: str | Sequence[str] | None) -> dict[str, Make]:
    """Return the factories of named trackers; a text is comma-separated.

    >>> named("")
    {}
    """
    listed = names.split(",") if isinstance(names, str) else names or []
    found = {}
    for name in filter(None, map(str.strip, listed)):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        for module in TRACKERS[name].modules:
            if importlib.util.find_spec(module) is None:
                raise InputError(
                    f"tracker {name!r} needs the package {module!r}: pip install 'fedzmg[{name}]'"
                )
        found[name] = TRACKERS[name].make
    return found
