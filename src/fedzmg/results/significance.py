"""Tests of significance for two algorithms, paired by seed: same split, same initial weights."""

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.05
MOST_FLIPPED_PAIRS = 20  # most pairs for which all sign patterns are enumerated


@dataclass(frozen=True)
class PairedTest:
    """Result of a two-sided paired Student t-test of ``a - b`` with ``n`` pairs."""

    n: int
    mean_difference: float
    sd_difference: float
    t: float
    p: float
    effect_size: float  # ``d_z``, the mean difference in units of its standard deviation
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class FamilyTest:
    """Test of the scores of ``first`` minus those of ``second``, in a family of tests."""

    first: str
    second: str
    test: PairedTest
    p_holm: float
    sign_flip: float | None  # exact p-value of the sign-flip test; None for too many pairs
    smallest_sign_flip: float  # smallest p-value that so many pairs can give
    seeds_needed: int | None  # to find an effect of this size with power 0.8; None: no effect

    @property
    def significant(self) -> bool:
        return self.p_holm <= LEVEL


def paired_t(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> PairedTest:
    """Test whether paired scores differ in the mean.

    Differences that are all equal, up to the rounding of the scores, leave no spread to test
    against. The result is then certain equality (t = 0, p = 1) if they are zero and certain
    difference (t = +-inf, p = 0) otherwise. ``level`` is that of the confidence interval.
    """
    # Imported late, and without scipy.stats, which takes a second more.
    from scipy import special  # type: ignore[import-untyped, unused-ignore]

    differences, rounding = _paired_differences(a, b)
    n, mean = len(differences), float(np.mean(differences))
    if np.all(np.abs(differences - mean) <= rounding):
        mean = mean if abs(mean) > rounding else 0.0
        certain = math.copysign(math.inf, mean) if mean else 0.0
        return PairedTest(n, mean, 0.0, certain, 0.0 if mean else 1.0, certain, mean, mean)
    # A power of two as the unit changes no bit, and squares neither overflow nor underflow.
    unit = 2.0 ** math.frexp(float(np.abs(differences).max()))[1]
    scaled = differences / unit
    middle, variance = float(np.mean(scaled)), float(np.var(scaled, ddof=1))
    error, sd = math.sqrt(variance / n), math.sqrt(variance)
    t, reach = middle / error, float(special.stdtrit(n - 1, (1 + level) / 2)) * error
    p = 2 * float(special.stdtr(n - 1, -abs(t)))
    low, high = unit * (middle - reach), unit * (middle + reach)
    return PairedTest(n, mean, unit * sd, t, p, middle / sd, low, high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust a family's p-values by Holm's procedure, which bounds any false rejection."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    scaled = np.minimum(1.0, p[order] * np.arange(len(p), 0, -1))
    adjusted[order] = np.maximum.accumulate(scaled)
    return list(map(float, adjusted))


def family(
    scores: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]
) -> list[FamilyTest]:
    """Test pairs of labels as one family, each over the seeds that both have, if two or more."""
    found: list[tuple[str, str, PairedTest, float | None]] = []
    for first, second in pairs:
        seeds = [seed for seed in scores[first] if seed in scores[second]]
        a, b = ([scores[label][seed] for seed in seeds] for label in (first, second))
        if len(seeds) > 1:
            flipped = sign_flip(a, b) if len(seeds) <= MOST_FLIPPED_PAIRS else None
            found.append((first, second, paired_t(a, b), flipped))
    adjusted = holm([test.p for _, _, test, _ in found])
    return [
        FamilyTest(first, second, test, p_holm, flipped, 2.0 / 2.0**test.n,
                   seeds_needed(test.effect_size) if test.effect_size else None)
        for (first, second, test, flipped), p_holm in zip(found, adjusted, strict=True)
    ]  # fmt: skip


def sign_flip(a: ArrayLike, b: ArrayLike) -> float:
    """Return the exact share of sign patterns whose sum of differences reaches the observed one."""
    differences, rounding = _paired_differences(a, b)
    # scipy's permutation_test takes 20 s for 20 pairs, this takes 10 ms. A pattern and its mirror
    # image have the same absolute sum, so the first sign can stay fixed.
    sums = differences[:1]
    for difference in differences[1:]:
        sums = np.concatenate((sums + difference, sums - difference))
    # Patterns that tie with the observed sum count, whatever the order of summation.
    observed = abs(float(sums[0])) - len(differences) ** 2 * rounding
    return float(np.mean(np.abs(sums) >= observed))


def seeds_needed(effect_size: float, power: float = 0.8, level: float = LEVEL) -> int:
    """Return the seeds, 2 or more, whose paired t-test finds an effect with this power."""
    counts, effect = range(2, 2**62), abs(effect_size)
    return 2 + bisect_left(counts, power, key=lambda n: _power(effect, n, level))


def _power(effect: float, n: int, level: float) -> float:
    from scipy import special  # type: ignore[import-untyped, unused-ignore]

    freedom, shift = n - 1, effect * math.sqrt(n)
    critical = -float(special.stdtrit(freedom, level / 2.0))
    # The series gives up for huge shifts, which no test misses.
    missed, reversed_ = np.nan_to_num(special.nctdtr(freedom, shift, [critical, -critical]))
    return 1.0 - float(missed) + float(reversed_)


def _paired_differences(a: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.float64], float]:
    """Return ``a - b`` and a bound on the rounding error of a difference."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    largest = float(max(np.abs(first).max(), np.abs(second).max()))
    return first - second, 4.0 * sys.float_info.epsilon * largest
