"""Tests of significance for two algorithms that ran with the same seeds.

Runs are paired by seed: both algorithms saw the same split and the same start, so the differences
per seed carry the evidence, and there are few of them.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special  # type: ignore[import-untyped, unused-ignore]

MOST_FLIPPED_PAIRS = 20
"""Largest number of pairs for which ``sign_flip`` enumerates all sign patterns."""


@dataclass(frozen=True)
class PairedTest:
    """StudyResult of a two-sided paired Student t-test.

    Attributes:
        n: Number of pairs.
        mean_difference: Mean of ``a - b``.
        sd_difference: Sample standard deviation of ``a - b``.
        t: The test statistic with ``n - 1`` degrees of freedom.
        p: Two-sided p-value.
        effect_size: ``d_z``, the mean difference in units of its standard deviation.
        ci_low: Lower end of the confidence interval of the mean difference.
        ci_high: Upper end of the confidence interval of the mean difference.
    """

    n: int
    mean_difference: float
    sd_difference: float
    t: float
    p: float
    effect_size: float
    ci_low: float
    ci_high: float


def paired_t(a: Iterable[float], b: Iterable[float], *, level: float = 0.95) -> PairedTest:
    """Test whether paired scores differ in the mean.

    Differences that are all equal, up to the rounding of the scores, leave no spread to test
    against: the outcome is then certain equality (t = 0, p = 1) if they are zero and certain
    difference (t = +-inf, p = 0) otherwise.

    Args:
        a: Scores of the first algorithm, one per seed.
        b: Scores of the second algorithm with the same seeds in the same order.
        level: Confidence level of the interval.

    Returns:
        The test of ``a - b`` against zero.

    Raises:
        ValueError: If there are fewer than two pairs, the lengths differ, a score is not finite,
            or the level is not between 0 and 1.
    """
    differences, rounding = _paired_differences(a, b)
    n = len(differences)
    if n < 2:
        raise ValueError(f"a paired test needs at least 2 pairs, got {n}")
    _check_open_unit("level", level)

    mean = statistics.fmean(differences)
    if all(abs(difference - mean) <= rounding for difference in differences):
        return _without_spread(n, mean if abs(mean) > rounding else 0.0)

    sd = statistics.stdev(differences)
    effect_size = mean / sd
    t = effect_size * math.sqrt(n)
    p = min(1.0, 2.0 * float(special.stdtr(n - 1, -abs(t))))
    margin = float(special.stdtrit(n - 1, (1.0 + level) / 2.0)) * sd / math.sqrt(n)
    return PairedTest(n, mean, sd, t, p, effect_size, mean - margin, mean + margin)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of a family of tests by Holm's step-down procedure.

    Args:
        p_values: The raw p-values.

    Returns:
        The adjusted p-values in the same order. Rejecting those at or below a level keeps the
        chance of any false rejection in the family at or below that level.

    Raises:
        ValueError: If a value is not a probability.
    """
    for p in p_values:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p_values must lie between 0 and 1, got {p}")
    adjusted = [0.0] * len(p_values)
    largest_so_far = 0.0
    by_size = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for remaining, i in zip(range(len(p_values), 0, -1), by_size, strict=True):
        largest_so_far = max(largest_so_far, min(1.0, remaining * p_values[i]))
        adjusted[i] = largest_so_far
    return adjusted


@dataclass(frozen=True)
class FamilyTest:
    """One comparison of a family of tests.

    Attributes:
        first: Name of the algorithm whose scores are the minuend.
        second: Name of the other.
        test: The paired t-test of first minus second.
        p_holm: Its p-value, adjusted over the family.
        sign_flip: The exact p-value of the sign-flip test; None for too many pairs.
        smallest_sign_flip: The smallest that so many pairs can give.
        seeds_needed: Seeds with which an effect of this size would be found with power 0.8 at the
            level 0.05; None if there is none to find.
    """

    first: str
    second: str
    test: PairedTest
    p_holm: float
    sign_flip: float | None
    smallest_sign_flip: float
    seeds_needed: int | None


def family(
    scores: Mapping[str, Sequence[float]], compared: Sequence[tuple[str, str]]
) -> list[FamilyTest]:
    """Test pairs of algorithms as one family.

    A pair without a finite score for every seed is left out: it cannot be tested.

    Args:
        scores: Scores by algorithm, one per seed, all with the same seeds in the same order.
        compared: The pairs to test.

    Returns:
        A test for each pair that can be tested, in the given order; none for a single seed.
    """
    able = [
        (first, second)
        for first, second in compared
        if len(scores[first]) > 1 and all(map(math.isfinite, [*scores[first], *scores[second]]))
    ]
    tests = [paired_t(scores[first], scores[second]) for first, second in able]
    adjusted = holm([test.p for test in tests])
    return [
        FamilyTest(
            first=first,
            second=second,
            test=test,
            p_holm=p_holm,
            sign_flip=(
                sign_flip(scores[first], scores[second]) if test.n <= MOST_FLIPPED_PAIRS else None
            ),
            smallest_sign_flip=2.0 / 2.0**test.n,
            seeds_needed=_seeds_for(test.effect_size),
        )
        for (first, second), test, p_holm in zip(able, tests, adjusted, strict=True)
    ]


def _seeds_for(effect_size: float) -> int | None:
    """Seeds for an observed effect, if there is one."""
    return None if effect_size == 0.0 else seeds_needed(effect_size)


def sign_flip(a: Iterable[float], b: Iterable[float]) -> float:
    """Return the exact two-sided p-value of the sign-flip permutation test.

    If the algorithms were exchangeable, each difference would carry either sign with equal chance.
    The p-value is the share of the ``2**n`` sign patterns whose absolute sum reaches the observed
    one; it needs no normality and is never below ``2 / 2**n``.

    Args:
        a: Scores of the first algorithm, one per seed.
        b: Scores of the second algorithm with the same seeds in the same order.

    Returns:
        The p-value.

    Raises:
        ValueError: If there is no pair or more than ``MOST_FLIPPED_PAIRS``, the lengths differ,
            or a score is not finite.
    """
    differences, rounding = _paired_differences(a, b)
    n = len(differences)
    if not 1 <= n <= MOST_FLIPPED_PAIRS:
        raise ValueError(f"sign_flip takes 1 to {MOST_FLIPPED_PAIRS} pairs, got {n}")
    # A pattern and its mirror image have the same absolute sum: the first sign can stay fixed.
    sums = np.array(differences[:1])
    for difference in differences[1:]:
        sums = np.concatenate((sums + difference, sums - difference))
    # Patterns that tie with the observed sum must count, whatever the order of summation left.
    observed = abs(float(sums[0])) - n * n * rounding
    return float(np.mean(np.abs(sums) >= observed))


def seeds_needed(effect_size: float, power: float = 0.8, level: float = 0.05) -> int:
    """Return how many seeds a two-sided paired t-test needs to find an effect.

    Args:
        effect_size: ``d_z``, the true mean difference in units of its standard deviation; the
            sign does not matter.
        power: Wanted chance of a p-value at or below ``level``.
        level: Level of significance.

    Returns:
        The smallest number of pairs, at least 2, that has the power.

    Raises:
        ValueError: If the effect is zero or nan, or a probability is not between 0 and 1.
    """
    effect = abs(effect_size)
    if not effect > 0.0:
        raise ValueError(f"effect_size must be a number other than 0, got {effect_size}")
    _check_open_unit("power", power)
    _check_open_unit("level", level)

    enough = 2
    while _power(effect, enough, level) < power:
        enough *= 2
    too_few = max(1, enough // 2)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if _power(effect, middle, level) < power:
            too_few = middle
        else:
            enough = middle
    return enough


def _paired_differences(a: Iterable[float], b: Iterable[float]) -> tuple[list[float], float]:
    """Return ``a - b`` and how far rounding of the scores may have moved a difference."""
    first, second = [float(x) for x in a], [float(x) for x in b]
    if len(first) != len(second):
        raise ValueError(f"a and b must have the same length, got {len(first)} and {len(second)}")
    differences = [x - y for x, y in zip(first, second, strict=True)]
    for x, y, difference in zip(first, second, differences, strict=True):
        if not math.isfinite(difference):
            raise ValueError(f"scores must be finite, got the pair {x} and {y}")
    largest = max((abs(score) for score in first + second), default=0.0)
    return differences, 4.0 * sys.float_info.epsilon * largest


def _without_spread(n: int, difference: float) -> PairedTest:
    """Return the test of n differences that are all the same."""
    certain = math.copysign(math.inf, difference) if difference else 0.0
    return PairedTest(
        n=n,
        mean_difference=difference,
        sd_difference=0.0,
        t=certain,
        p=0.0 if difference else 1.0,
        effect_size=certain,
        ci_low=difference,
        ci_high=difference,
    )


def _power(effect: float, n: int, level: float) -> float:
    """Return the power of a two-sided paired t-test with n pairs."""
    freedom = n - 1
    critical = -float(special.stdtrit(freedom, level / 2.0))
    shift = effect * math.sqrt(n)
    missed = float(special.nctdtr(freedom, shift, critical))
    if math.isnan(missed):
        # The series gives up on large shifts only, where the spread of the numerator is too small
        # to matter and the test is missed exactly when the estimated deviation is too large.
        ratio = shift / critical
        missed = float(special.chdtrc(freedom, freedom * ratio * ratio))
    found_reversed = float(special.nctdtr(freedom, shift, -critical))
    # Here the series gives up where the wrong tail is negligible.
    return 1.0 - missed + (0.0 if math.isnan(found_reversed) else found_reversed)


def _check_open_unit(name: str, value: float) -> None:
    """Raise ValueError for a value that is not strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}")
