"""Spread of metrics and losses over the clients of a study, by algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.results.averaging import Band, band_around
from fedzmg.results.grouping import Study
from fedzmg.results.runs import Run
from fedzmg.storage.client_metrics import ClientTable

SHARES = np.linspace(0.0, 1.0, 101)
"""Shares of clients at which sorted curves are evaluated."""
MOST_POINTS = 100
"""Largest number of points of a loss curve; rounds are averaged because cohorts are small."""
LOSS_QUANTILES = 5
"""Number of loss quantiles in a log: least, 10 %, median, 90 %, most."""


class Sorted(NamedTuple):
    """Metric of clients, worst first, at :data:`SHARES`, averaged over runs."""

    mean: NDArray[np.float64]
    band: Band | None
    """None for a single run."""


class Bands(NamedTuple):
    """Median and the 10 % and 90 % quantiles by round."""

    rounds: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


def evaluated_clients(runs: Sequence[Run]) -> list[tuple[int, ClientTable]]:
    """Return seed and clients of the finished runs that evaluated clients at their end."""
    return [
        (run.seed, run.clients)
        for run in runs
        if run.clients is not None
        and run.complete
        and run.diverged is None
        and run.clients.rounds[-1] == run.done
    ]


def sorted_averages(study: Study) -> dict[str, Sorted]:
    """Return the sorted clients of every algorithm that evaluated them."""
    found = {}
    for label, own in _tables(study).items():
        curves = sorted_curves(own, higher_is_better=study.higher_is_better)
        mean, band = curves.mean(axis=0), None
        if len(curves) > 1:
            band = band_around(mean, curves.std(axis=0, ddof=1), study.metric)
        found[label] = Sorted(mean, band)
    return found


def metric_spreads(study: Study) -> dict[str, Bands]:
    """Return the metric over clients by round, by label; two evaluations are needed."""
    found = {label: metric_bands(own) for label, own in _tables(study).items()}
    return {label: one for label, one in found.items() if one is not None}


def loss_spreads(study: Study) -> dict[str, Bands]:
    """Return the training losses over clients by round, by label."""
    members = study.members.items()
    found = {label: loss_bands([run.log.client_loss for run in runs]) for label, runs in members}
    return {label: one for label, one in found.items() if one is not None}


def _tables(study: Study) -> dict[str, list[ClientTable]]:
    found = {label: evaluated_clients(runs) for label, runs in study.members.items()}
    return {label: [table for _, table in own] for label, own in found.items() if own}


def sorted_curves(runs: Sequence[ClientTable], *, higher_is_better: bool) -> NDArray[np.float64]:
    """Return the final metric of every run's clients, worst first, at :data:`SHARES`."""
    shares = SHARES if higher_is_better else SHARES[::-1]
    return np.stack([np.quantile(run.metric[-1], shares) for run in runs])


def metric_bands(runs: Sequence[ClientTable]) -> Bands | None:
    """Average the quantiles over clients by round; None for fewer than two evaluations."""
    rounds = sorted(set.intersection(*(set(run.rounds.tolist()) for run in runs)))
    if len(rounds) < 2:
        return None
    table = [
        np.quantile(run.metric[np.isin(run.rounds, rounds)], (0.1, 0.5, 0.9), axis=1)
        for run in runs
    ]
    return Bands(np.array(rounds, dtype=float), *np.mean(table, axis=0))


def loss_bands(logs: Sequence[Sequence[Sequence[float] | None]]) -> Bands | None:
    """Average the loss quantiles, or None, of every run's rounds over runs and nearby rounds."""
    length = max(map(len, logs))
    step = -(-length // MOST_POINTS)
    points = []
    for first in range(0, length, step):
        near = [losses for log in logs for losses in log[first : first + step] if losses]
        inner = np.array([losses[1:4] for losses in near if len(losses) == LOSS_QUANTILES])
        inner = inner[np.isfinite(inner).all(axis=1)] if len(inner) else inner
        if len(inner):
            middle = (first + 1 + min(first + step, length)) / 2.0
            points.append((middle, *inner.mean(axis=0)))
    return Bands(*map(np.array, zip(*points, strict=True))) if points else None
