"""How the single clients of a study's runs did: their spread, by algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.results.clients import Clients
from fedzmg.results.grouping import Study
from fedzmg.results.runs import Run
from fedzmg.results.spread import Band, band_around, possible

SHARES = np.linspace(0.0, 1.0, 101)
"""Where the sorted curve of an algorithm's clients is drawn."""
MOST_POINTS = 100
"""Of a curve over rounds; a cohort is small and its losses jump, so rounds are drawn together."""
LOSS_QUANTILES = 5
"""Least, 10 %, median, 90 % and most of a cohort's losses, as the log has them."""


class Sorted(NamedTuple):
    """The metric of clients, worst first, at :data:`SHARES`; averaged over runs."""

    mean: NDArray[np.float64]
    band: Band | None
    """None for a single run."""


class Bands(NamedTuple):
    """The middle of a spread and its inner four fifths, by index of the round."""

    indices: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


def seen(runs: Sequence[Run]) -> list[tuple[int, Clients]]:
    """Seed and clients of the runs that came to a good end and looked at them."""
    return [
        (run.seed, run.clients)
        for run in runs
        if run.clients is not None
        and run.complete
        and run.diverged is None
        and run.clients.rounds[-1] == run.done
    ]


def sorted_averages(study: Study) -> dict[str, Sorted]:
    """The clients of every algorithm that looked at them, worst first."""
    found = {}
    for label, runs in study.members.items():
        own = [one for _, one in seen(runs)]
        if own:
            table = sorted_curves(own, higher_is_better=study.higher_is_better)
            mean, band = table.mean(axis=0), None
            if len(table) > 1:
                band = band_around(mean, table.std(axis=0, ddof=1), possible(study.metric))
            found[label] = Sorted(mean, band)
    return found


def metric_spreads(study: Study) -> dict[str, Bands]:
    """The metric over clients by round, of every algorithm that looked more than once."""
    found = {}
    for label, runs in study.members.items():
        own = [one for _, one in seen(runs)]
        one = metric_bands(own) if own else None
        if one is not None:
            found[label] = one
    return found


def loss_spreads(study: Study) -> dict[str, Bands]:
    """Training losses over the clients of a round, of every algorithm that kept them."""
    found = {
        label: loss_bands([run.log.client_loss for run in runs])
        for label, runs in study.members.items()
    }
    return {label: one for label, one in found.items() if one is not None}


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
