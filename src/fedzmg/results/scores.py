"""Scores of validation curves: how soon a curve arrives and how high it stays.

A curve is a list of evaluations at strictly increasing round indices. Index ``r`` is the state
after round ``r + 1``, so a run of 1000 rounds evaluated every five has the indices 0, 5, ..., 995.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

ThresholdRule: TypeAlias = Literal["rolling_mean", "rolling_min", "stays_above"]
FinalRule: TypeAlias = Literal["full", "author"]


def scheduled(total: int, every: int) -> range | list[int]:
    """Return the round indices whose evaluations count for scores.

    Evaluations every five rounds have the indices 0, 5, 10, ... A run is evaluated once more after
    its last round; that counts only where none of the others lies in the last tenth of the rounds,
    which is what final values are about.

    Args:
        total: Number of rounds of the run.
        every: Rounds from one evaluation to the next.

    >>> list(scheduled(11, 5)), scheduled(20, 20), scheduled(4, 5), list(scheduled(0, 5))
    ([0, 5, 10], [0, 19], [0, 3], [])
    """
    regular = range(0, total, every)
    late = total - max(1, total // 10)
    return [*regular, total - 1] if regular and regular[-1] < late else regular


def rounds_to_threshold(
    rounds: ArrayLike,
    values: ArrayLike,
    threshold: float,
    *,
    window: int = 4,
    rule: ThresholdRule = "rolling_mean",
    higher_is_better: bool = True,
) -> int | None:
    """Return the round index at which a curve has arrived at a threshold.

    The answer is the index of the last round in the first full window that qualifies, so
    with an evaluation every five rounds and a window of four it is at least 15. A window that
    holds a non-finite value never qualifies.

    Args:
        rounds: Strictly increasing round indices of the evaluations.
        values: One value per evaluation.
        threshold: The target. Reaching it exactly counts as arrival.
        window: Number of consecutive evaluations in a window.
        rule: ``rolling_mean`` asks the mean of the window to reach the threshold,
            ``rolling_min`` asks every value of the window, and ``stays_above`` asks the mean of
            this window and of all later ones.
        higher_is_better: False for a metric that falls, such as a loss.

    Returns:
        The round index, or None if the curve never arrives.

    Raises:
        ValueError: If the curve, the threshold, the window or the rule is invalid.
    """
    indices, heights = _checked_curve(rounds, values)
    if not math.isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold}")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    _check_rule(rule, ThresholdRule)
    if window > len(heights):
        return None
    if not higher_is_better:
        # A falling metric reaches its threshold exactly when its mirror image rises to it.
        heights, threshold = -heights, -threshold

    if rule == "rolling_min":
        qualifies = _whole_windows(heights >= threshold, window)
    else:
        qualifies = _window_means_reach(heights, threshold, window)
    qualifies &= _whole_windows(np.isfinite(heights), window)
    if rule == "stays_above":
        # A window that is still followed by one below the threshold has not settled.
        qualifies = np.logical_and.accumulate(qualifies[::-1])[::-1]
    if not qualifies.any():
        return None
    return int(indices[int(np.argmax(qualifies)) + window - 1])


@dataclass(frozen=True)
class Arrival:
    """When the runs of an algorithm reach a threshold, as round indices; None is never.

    Attributes:
        averaged: Of the curve averaged over runs.
        runs: Of every run by itself.
        mean: Over the runs that arrived.
        sd: Sample standard deviation over them; None for fewer than two.
        never: How many runs never arrived.
    """

    averaged: int | None
    runs: list[int | None]
    mean: float | None
    sd: float | None
    never: int


def arrival(
    rounds: ArrayLike,
    runs: ArrayLike,
    threshold: float,
    *,
    window: int = 4,
    rule: ThresholdRule = "rolling_mean",
    higher_is_better: bool = True,
) -> Arrival:
    """Return when runs reach a threshold: on average, and each of them.

    Args:
        rounds: Strictly increasing round indices of the evaluations.
        runs: One row of values per run.
        threshold: The target.
        window: Number of consecutive evaluations in a window.
        rule: As for :func:`rounds_to_threshold`.
        higher_is_better: False for a metric that falls.

    Returns:
        Round indices; runs that never arrive are counted and leave the mean alone.
    """

    def reached(values: ArrayLike) -> int | None:
        return rounds_to_threshold(
            rounds, values, threshold, window=window, rule=rule, higher_is_better=higher_is_better
        )

    each = [reached(values) for values in np.asarray(runs, dtype=np.float64)]
    arrived = [index for index in each if index is not None]
    return Arrival(
        averaged=reached(mean_curve(runs)),
        runs=each,
        mean=statistics.fmean(arrived) if arrived else None,
        sd=statistics.stdev(arrived) if len(arrived) > 1 else None,
        never=len(each) - len(arrived),
    )


def final_score(
    rounds: ArrayLike,
    values: ArrayLike,
    last: int | None = None,
    *,
    total: int,
    rule: FinalRule = "full",
) -> float:
    """Return the mean of the evaluations in the last rounds of a run.

    For 1000 rounds with an evaluation every five, the last hundred rounds hold the twenty
    evaluations 900, 905, ..., 995. Where the evaluations are so sparse that none falls into the
    last rounds, the latest evaluation stands for them.

    Args:
        rounds: Strictly increasing round indices of the evaluations, all below ``total``.
        values: One value per evaluation.
        last: How many rounds count as the last ones. By default, and for a run that is not longer
            than ``last``, a tenth of the run, at least one round.
        total: Number of rounds of the run.
        rule: ``full`` takes indices from ``total - last`` on; ``author`` takes only those above
            it, which is one evaluation fewer in the example: 905, ..., 995.

    Returns:
        The mean, or nan if one of the evaluations is not finite.

    Raises:
        ValueError: If the curve, ``last``, ``total`` or the rule is invalid.
    """
    indices, heights = _checked_curve(rounds, values)
    _check_rule(rule, FinalRule)
    if total < 1:
        raise ValueError(f"total must be at least 1, got {total}")
    if indices[-1] >= total:
        raise ValueError(f"rounds must lie below total = {total}, got {indices[-1]}")
    if last is not None and last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    if last is None or last >= total:
        last = max(1, total // 10)

    start = total - last if rule == "full" else total - last + 1
    first_counted = min(int(np.searchsorted(indices, start)), len(heights) - 1)
    return _mean(heights[first_counted:])


def fell_from(values: ArrayLike, final: float, *, window: int = 4) -> float | None:
    """Return the height from which a rising curve fell back, None if it kept half of it.

    Such a run did not diverge, yet its final value says nothing of how well it had learnt.

    Args:
        values: One value per evaluation.
        final: What counts as the end of the run, as from :func:`final_score`.
        window: Number of consecutive evaluations whose mean counts as a height.

    Returns:
        The best mean of a window if the end lies below half of it.
    """
    heights = np.asarray(values, dtype=np.float64)
    if len(heights) < window or not math.isfinite(final) or not np.isfinite(heights).all():
        return None
    best = float(sliding_window_view(heights, window).mean(-1).max())
    return best if final < best / 2 else None


def mean_curve(runs: ArrayLike) -> NDArray[np.float64]:
    """Return the average over runs of an array ``[runs, evaluations]``.

    An evaluation at which any run is not finite is nan: a run that diverged has no average with
    the others, and dropping it silently would flatter the algorithm.

    Args:
        runs: One row per run.

    Returns:
        One value per evaluation.

    Raises:
        ValueError: If the array is not two-dimensional or is empty.
    """
    table = np.asarray(runs, dtype=np.float64)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"runs must have the shape [runs, evaluations], got {table.shape}")
    return np.array([_mean(column) for column in table.T])


def late_stage_mean(
    rounds: ArrayLike,
    curves: Mapping[str, ArrayLike],
    threshold_rounds: Mapping[str, int | None],
) -> dict[str, float] | None:
    """Compare algorithms where all of them have arrived at the threshold.

    Args:
        rounds: Strictly increasing round indices that the curves share.
        curves: The run-averaged curve of each algorithm.
        threshold_rounds: The round index at which each algorithm arrived, None for never.

    Returns:
        For each algorithm the mean over the evaluations strictly after the arrival of the slowest
        one (nan if one of them is not finite). None if an algorithm never arrives, or if no
        evaluation follows the slowest arrival.

    Raises:
        ValueError: If there is no curve, a curve is invalid, or the names differ.
    """
    if not curves:
        raise ValueError("curves must hold at least one algorithm, got none")
    if curves.keys() != threshold_rounds.keys():
        unmatched = sorted(curves.keys() ^ threshold_rounds.keys())
        raise ValueError(f"curves and threshold_rounds must name the same, unmatched: {unmatched}")
    checked = {name: _checked_curve(rounds, values) for name, values in curves.items()}

    arrivals = [arrival for arrival in threshold_rounds.values() if arrival is not None]
    if len(arrivals) < len(threshold_rounds):
        return None
    slowest = max(arrivals)
    if all(indices[-1] <= slowest for indices, _ in checked.values()):
        return None
    return {name: _mean(heights[indices > slowest]) for name, (indices, heights) in checked.items()}


def _checked_curve(
    rounds: ArrayLike, values: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a curve as arrays, or raise ValueError where it is none."""
    indices = np.asarray(rounds)
    heights = np.asarray(values, dtype=np.float64)
    for name, array in (("rounds", indices), ("values", heights)):
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"{name} must be a non-empty list, got the shape {array.shape}")
    if len(indices) != len(heights):
        raise ValueError(
            f"rounds and values must have the same length, got {len(indices)} and {len(heights)}"
        )
    if indices.dtype.kind not in "iu":
        raise ValueError(f"rounds must be integers, got the type {indices.dtype}")
    indices = indices.astype(np.int64)
    if indices[0] < 0:
        raise ValueError(f"rounds must not be negative, got {indices[0]}")
    falls = np.flatnonzero(np.diff(indices) <= 0)
    if falls.size:
        before, after = indices[falls[0]], indices[falls[0] + 1]
        raise ValueError(f"rounds must strictly increase, got {before} followed by {after}")
    return indices, heights


def _check_rule(rule: str, allowed: object) -> None:
    """Raise ValueError for a rule that is not one of a Literal type."""
    if rule not in get_args(allowed):
        raise ValueError(f"rule must be one of {get_args(allowed)}, got {rule!r}")


def _whole_windows(flags: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
    """Say for each full window whether all its flags are set."""
    return np.asarray(sliding_window_view(flags, window).all(axis=1))


def _window_means_reach(
    heights: NDArray[np.float64], threshold: float, window: int
) -> NDArray[np.bool_]:
    """Say for each full window whether its mean reaches the threshold.

    Exact arithmetic, because a window that lies on the threshold (three times 0.1 against 0.1)
    must not be won or lost by rounding. A non-finite value counts as lying on the threshold here;
    the caller rejects its windows.
    """
    bar = Fraction(threshold)
    surplus = (
        Fraction(height) - bar if math.isfinite(height) else Fraction(0)
        for height in heights.tolist()
    )
    running = list(accumulate(surplus, initial=Fraction(0)))
    return np.array(
        [after >= before for before, after in zip(running, running[window:], strict=False)]
    )


def _mean(values: NDArray[np.float64]) -> float:
    """Return the mean, or nan if a value is not finite."""
    return float(np.mean(values)) if np.isfinite(values).all() else math.nan
