"""The band around a mean: one standard deviation either way, as far as the metric can go."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.results.formatting import is_share


class Range(NamedTuple):
    """The least and the most that a metric can be."""

    low: float
    high: float


ANY = Range(-math.inf, math.inf)
_SHARE = Range(0.0, 1.0)


class Band(NamedTuple):
    """Lower and upper edge."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    cut: bool
    """Whether an edge would leave what is possible."""


def possible(metric: str) -> Range:
    """What a metric can be, as far as its name tells."""
    return _SHARE if is_share(metric) else ANY


def band_around(mean: NDArray[np.float64], spread: NDArray[np.float64], within: Range) -> Band:
    """One standard deviation either way, cut where no run can be.

    >>> band_around(np.array([0.8, 0.5]), np.array([0.4, 0.1]), possible("accuracy")).high.tolist()
    [1.0, 0.6]
    """
    low, high = mean - spread, mean + spread
    # Somebody's accuracy may be counted in percent: what means leave is no limit.
    if np.any((mean < within.low) | (mean > within.high)):
        return Band(low, high, cut=False)
    cut = bool(np.any((low < within.low) | (high > within.high)))
    return Band(np.maximum(low, within.low), np.minimum(high, within.high), cut)
