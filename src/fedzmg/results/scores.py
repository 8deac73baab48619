"""Scores of validation curves: rounds to a threshold and final values.

A curve is a list of evaluations at strictly increasing rounds, which count from 1. A run of 1000
rounds that is evaluated every five has evaluations after the rounds 1, 6, ..., 996.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

ThresholdRule: TypeAlias = Literal["rolling_mean", "rolling_min", "stays_above"]
FinalRule: TypeAlias = Literal["full", "author"]
RULES: tuple[ThresholdRule, ...] = get_args(ThresholdRule)
FINAL_RULES: tuple[FinalRule, ...] = get_args(FinalRule)


def scheduled(total: int, every: int) -> range | list[int]:
    """Return the rounds whose evaluations count for scores.

    The evaluation after the last round counts only if no other lies in the last tenth of the
    rounds.

    >>> list(scheduled(11, 5)), scheduled(20, 20), scheduled(4, 5), list(scheduled(0, 5))
    ([1, 6, 11], [1, 20], [1, 4], [])
    """
    regular = range(1, total + 1, every)
    late = total - max(1, total // 10) + 1
    return [*regular, total] if regular and regular[-1] < late else regular


def rounds_to_threshold(
    rounds: ArrayLike,
    values: ArrayLike,
    threshold: float,
    *,
    window: int = 4,
    rule: ThresholdRule = "rolling_mean",
    higher_is_better: bool = True,
) -> int | None:
    """Return the last round of the first window that reaches a threshold; None for never.

    A window is a number of consecutive evaluations, all of them finite. ``rolling_mean`` asks its
    mean to reach the threshold, ``rolling_min`` asks every value, and ``stays_above`` asks the mean
    of this window and of all later ones. Equality counts, up to a few units in the last place.
    """
    numbers, heights = np.asarray(rounds), np.asarray(values, dtype=np.float64)
    if window > len(heights):
        return None
    if not higher_is_better:
        # A falling metric reaches its threshold exactly when its mirror image rises to it.
        heights, threshold = -heights, -threshold
    finite = sliding_window_view(np.isfinite(heights), window).all(axis=1)
    windows = sliding_window_view(np.where(np.isfinite(heights), heights, 0.0), window)
    reached = windows.min(axis=1) if rule == "rolling_min" else windows.mean(axis=1)
    slack = 8 * sys.float_info.epsilon * abs(threshold)  # means may tie with the threshold
    qualifies = finite & (reached >= threshold - slack)
    if rule == "stays_above":
        # A window that is still followed by one below the threshold has not settled.
        qualifies = np.logical_and.accumulate(qualifies[::-1])[::-1]
    return int(numbers[np.argmax(qualifies) + window - 1]) if qualifies.any() else None


def final_score(
    rounds: ArrayLike,
    values: ArrayLike,
    last: int | None = None,
    *,
    total: int,
    rule: FinalRule = "full",
) -> float:
    """Return the mean of the evaluations in the ``last`` rounds of ``total``, else the latest one.

    For 1000 rounds with an evaluation every five, the last hundred rounds hold the twenty
    evaluations 901, 906, ..., 996; the rule ``author`` leaves out the first of them. By default,
    and for a run that is not longer than ``last``, it is a tenth of the run. The mean is nan if one
    of the evaluations is not finite.
    """
    if last is None or last >= total:
        last = max(1, total // 10)
    start = np.searchsorted(rounds, total - last + (1 if rule == "full" else 2))
    heights = np.asarray(values, dtype=np.float64)
    return _mean(heights[min(int(start), len(heights) - 1) :])


def fell_from(values: ArrayLike, final: float, *, window: int = 4) -> float | None:
    """Return the height from which a rising curve fell back, None if it kept half of it.

    A height is the mean of a window of evaluations.
    """
    heights = np.asarray(values, dtype=np.float64)
    if len(heights) < window or not math.isfinite(final) or not np.isfinite(heights).all():
        return None
    best = float(sliding_window_view(heights, window).mean(-1).max())
    return best if final < best / 2 else None


def mean_curve(runs: ArrayLike) -> NDArray[np.float64]:
    """Average an array ``[runs, evaluations]`` over runs; nan where any run is not finite."""
    return np.array([_mean(column) for column in np.asarray(runs, dtype=np.float64).T])


def late_stage_mean(
    rounds: ArrayLike, curves: Mapping[str, ArrayLike], threshold_rounds: Mapping[str, int | None]
) -> dict[str, float] | None:
    """Return each algorithm's mean strictly after the slowest one reached the threshold.

    ``curves`` are averaged over runs. The result is None if an algorithm never reaches the
    threshold, or if no evaluation follows.
    """
    known = [round_ for round_ in threshold_rounds.values() if round_ is not None]
    if not known or len(known) < len(threshold_rounds) or np.max(rounds) <= max(known):
        return None
    late = np.asarray(rounds) > max(known)
    return {name: _mean(np.asarray(values)[late]) for name, values in curves.items()}


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.mean(values)) if np.isfinite(values).all() else math.nan
