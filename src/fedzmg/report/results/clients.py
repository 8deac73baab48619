"""What run directories hold about single clients, and how it is spread over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.experiment.runs import clients as clients_file

SHARES = np.linspace(0.0, 1.0, 101)
"""Where the sorted curve of an algorithm's clients is drawn."""
MOST_POINTS = 100
"""Of a curve over rounds; a cohort is small and its losses jump, so rounds are drawn together."""
LOSS_QUANTILES = 5
"""Least, 10 %, median, 90 % and most of a cohort's losses, as the log has them."""


class Clients(NamedTuple):
    """How the models of one run did on each client's own examples."""

    part: str
    """Which examples: ``test`` or ``training``."""
    population: int
    """Clients that hold such examples; more than are listed where these are a sample."""
    examples: NDArray[np.int64]
    rounds: NDArray[np.int64]
    metric: NDArray[np.float64]
    """Evaluations x clients."""


class Bands(NamedTuple):
    """The middle of a spread and its inner four fifths, by index of the round."""

    indices: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


def read_clients(directory: Path) -> Clients | None:
    """Read what a run kept of single clients; None if it kept nothing.

    Raises:
        InputError: if the file is damaged.
    """
    table = clients_file.read_clients(directory)
    if table is None:
        return None
    return Clients(table.part, table.population, table.examples, table.rounds, table.metric)


def sorted_curves(runs: Sequence[Clients], *, higher_is_better: bool) -> NDArray[np.float64]:
    """The metric of every run's clients in the end, worst first, at :data:`SHARES`."""
    shares = SHARES if higher_is_better else SHARES[::-1]
    return np.stack([np.quantile(run.metric[-1], shares) for run in runs])


def metric_bands(runs: Sequence[Clients]) -> Bands | None:
    """How the metric is spread over clients by round; None unless clients were seen twice."""
    rounds = sorted(set(runs[0].rounds.tolist()).intersection(*(r.rounds.tolist() for r in runs)))
    if len(rounds) < 2:
        return None
    table = [
        np.quantile(run.metric[np.isin(run.rounds, rounds)], (0.1, 0.5, 0.9), axis=1).T
        for run in runs
    ]
    low, middle, high = np.mean(table, axis=0).T
    return Bands(np.array(rounds, dtype=float) - 1.0, low, middle, high)


def loss_bands(logs: Sequence[Sequence[Sequence[float] | None]]) -> Bands | None:
    """How the training loss is spread over the clients of a round.

    Args:
        logs: for every run its rounds in order, each with its losses or None.
    """
    length = max(map(len, logs))
    table = np.full((len(logs), length, LOSS_QUANTILES), np.nan)
    for i, log in enumerate(logs):
        for j, losses in enumerate(log):
            if losses is not None and len(losses) == LOSS_QUANTILES:
                table[i, j] = losses
    inner = table[:, :, 1:4]
    finite = np.isfinite(inner).all(axis=2)
    points = []
    step = -(-length // MOST_POINTS)
    for first in range(0, length, step):
        part = slice(first, min(first + step, length))
        if finite[:, part].any():
            values = inner[:, part][finite[:, part]].mean(axis=0)
            points.append((first + (part.stop - 1 - first) / 2.0, *values))
    if not points:
        return None
    return Bands(*(np.array(column) for column in zip(*points, strict=True)))
