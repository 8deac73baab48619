"""Tests of significance for paired runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped, unused-ignore]

from fedzmg.results.significance import (
    MOST_FLIPPED_PAIRS,
    family,
    holm,
    paired_t,
    seeds_needed,
    sign_flip,
)

FIRST = [39.1, 39.8, 39.4, 39.9, 39.3]
SECOND = [34.2, 35.1, 34.9, 34.6, 34.7]
# Published statistics of five pairs each, their published p-values, and p-values from a table.
PUBLISHED = [
    (2.043, 1.105e-1, 1.1057e-1),
    (4.025, 1.579e-2, 1.5799e-2),
    (1.452, 2.201e-1, 2.2014e-1),
    (3.854, 1.824e-2, 1.8240e-2),
    (7.804, 1.455e-3, 1.4547e-3),
    (20.716, 3.208e-5, 3.2078e-5),
]
PUBLISHED_HOLM = [0.221, 0.063, 0.221, 0.063, 0.0073, 0.00019]

scores = st.floats(0.0, 1.0)
score_pairs = st.lists(st.tuples(scores, scores), min_size=2, max_size=10)
probabilities = st.lists(st.floats(0.0, 1.0), max_size=12)


def with_statistic(t: float, n: int = 5) -> tuple[list[float], list[float]]:
    """Return paired scores whose test statistic is t."""
    shape = np.arange(n, dtype=float)
    unit = (shape - shape.mean()) / shape.std(ddof=1)
    return (unit + t / math.sqrt(n)).tolist(), [0.0] * n


def test_paired_t_reference() -> None:
    test = paired_t(FIRST, SECOND)
    assert test.n == 5
    assert test.mean_difference == pytest.approx(4.8)
    assert test.sd_difference == pytest.approx(0.31622776601683794)
    assert test.t == pytest.approx(33.941125496954264)
    assert test.p == pytest.approx(4.495077522450746e-06)
    assert test.effect_size == pytest.approx(33.941125496954264 / math.sqrt(5))


@settings(deadline=None)
@given(score_pairs, st.floats(0.5, 0.999))
def test_paired_t_agrees_with_scipy(pairs: list[tuple[float, float]], level: float) -> None:
    a, b = (list(column) for column in zip(*pairs, strict=True))
    assume(np.ptp(np.subtract(a, b)) > 1e-6)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(level)
    test = paired_t(a, b, level=level)
    assert test.t == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-9)
    assert test.ci_low == pytest.approx(interval.low, rel=1e-6, abs=1e-9)
    assert test.ci_high == pytest.approx(interval.high, rel=1e-6, abs=1e-9)


@given(score_pairs)
def test_paired_t_is_antisymmetric(pairs: list[tuple[float, float]]) -> None:
    a, b = zip(*pairs, strict=True)
    forth, back = paired_t(a, b), paired_t(b, a)
    assert back.mean_difference == -forth.mean_difference
    assert back.t == pytest.approx(-forth.t)
    assert back.effect_size == pytest.approx(-forth.effect_size)
    assert (back.ci_low, back.ci_high) == pytest.approx((-forth.ci_high, -forth.ci_low))
    assert (back.p, back.sd_difference) == pytest.approx((forth.p, forth.sd_difference))
    assert 0.0 <= forth.p <= 1.0


@pytest.mark.parametrize(
    ("a", "b", "difference", "t"),
    [
        ([0.3, 0.4, 0.7], [0.2, 0.3, 0.6], 0.1, math.inf),
        ([0.2, 0.3, 0.6], [0.3, 0.4, 0.7], -0.1, -math.inf),
        ([0.3, 0.5], [0.3, 0.5], 0.0, 0.0),
        ([0.1 + 0.2] * 3, [0.3] * 3, 0.0, 0.0),
    ],
)
def test_paired_t_constant_difference_up_to_rounding(
    a: list[float], b: list[float], difference: float, t: float
) -> None:
    test = paired_t(a, b)
    assert test.mean_difference == pytest.approx(difference)
    assert (test.sd_difference, test.t, test.effect_size) == (0.0, t, t)
    assert test.p == (0.0 if t else 1.0)
    assert test.ci_low == test.ci_high == test.mean_difference


def test_holm_reference() -> None:
    adjusted = holm([exact for _, _, exact in PUBLISHED])
    for value, published in zip(adjusted, PUBLISHED_HOLM, strict=True):
        assert value == pytest.approx(published, rel=0.02)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (holm([]), holm([0.9, 0.8])) == ([], [1.0, 1.0])


@given(probabilities)
def test_holm_never_lowers_and_keeps_the_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for raw, new in zip(p_values, adjusted, strict=True):
        assert raw <= new <= min(1.0, len(p_values) * raw)
    for i, j in itertools.combinations(range(len(p_values)), 2):
        if p_values[i] <= p_values[j]:
            assert adjusted[i] <= adjusted[j]
        else:
            assert adjusted[i] >= adjusted[j]


def test_sign_flip_counts_ties_whatever_the_rounding() -> None:
    # Differences 0.1, 0.2, -0.3 in any order sum to zero: every pattern is as extreme.
    assert sign_flip([0.1, 0.2, 0.0], [0.0, 0.0, 0.3]) == 1.0
    assert sign_flip([0.4, 0.5, 0.3], [0.3, 0.3, 0.6]) == 1.0


def test_sign_flip_largest_number_of_pairs() -> None:
    a = [1.0 + 0.01 * i for i in range(MOST_FLIPPED_PAIRS)]
    assert sign_flip(a, [0.0] * MOST_FLIPPED_PAIRS) == 2 / 2**MOST_FLIPPED_PAIRS


@pytest.mark.parametrize(
    ("effect_size", "power", "expected"),
    [
        # Values of common tables and programs of statistical power.
        (0.2, 0.8, 199),
        (0.5, 0.8, 34),
        (0.8, 0.8, 15),
        (0.5, 0.95, 54),
        (-0.5, 0.8, 34),
        (math.inf, 0.8, 2),
        (1e300, 0.8, 2),
    ],
)
def test_seeds_needed_reference(effect_size: float, power: float, expected: int) -> None:
    assert seeds_needed(effect_size, power) == expected


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 60.0), st.floats(0.1, 0.99), st.floats(1e-6, 0.09))
def test_seeds_needed_is_the_smallest_that_suffices(
    effect_size: float, power: float, level: float
) -> None:
    n = seeds_needed(effect_size, power, level)

    def reached(pairs: int) -> float:
        """Return the power from the noncentral F, whose variable is the square of t."""
        critical = stats.f.isf(level, 1, pairs - 1)
        return float(stats.ncf.sf(critical, 1, pairs - 1, pairs * effect_size**2))

    assert reached(n) >= power - 1e-6
    assert n == 2 or reached(n - 1) <= power + 1e-6


def test_family_of_the_papers_six_tests() -> None:
    """Scores with the published statistics give the published p-values and their correction."""
    scores: dict[str, dict[int, float]] = {}
    pairs = []
    for i, (t, _, _) in enumerate(PUBLISHED):
        pairs.append((f"a{i}", f"b{i}"))
        for label, values in zip(pairs[-1], with_statistic(t), strict=True):
            scores[label] = dict(enumerate(values))
    found = family(scores, pairs)
    assert [(f.first, f.second) for f in found] == pairs
    for one, (t, printed, exact), adjusted in zip(found, PUBLISHED, PUBLISHED_HOLM, strict=True):
        assert one.test.t == pytest.approx(t)
        assert one.test.p == pytest.approx(exact, rel=5e-5)
        assert one.test.p == pytest.approx(printed, rel=1e-3)
        assert one.p_holm == pytest.approx(adjusted, rel=0.02)
        assert one.test.effect_size == pytest.approx(t / math.sqrt(5))
        # With five pairs nothing below one in sixteen is possible.
        assert one.smallest_sign_flip == 1 / 16
        assert one.sign_flip is not None
        assert one.sign_flip >= 1 / 16
        assert one.seeds_needed == seeds_needed(t / math.sqrt(5))


def test_family_tests_the_seeds_that_both_have() -> None:
    scores = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {1: 5.0}, "c": {2: 4.0, 1: 2.0}, "d": {0: 1.0}}
    [one] = family(scores, [("a", "b"), ("a", "c"), ("a", "d")])
    assert (one.second, one.test.n, one.test.p, one.seeds_needed) == ("c", 2, 1.0, None)
    many = {"a": {i: float(i) for i in range(21)}, "b": {i: float(i % 3) for i in range(21)}}
    assert family(many, [("a", "b")])[0].sign_flip is None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=7))
def test_sign_flip_agrees_with_scipy(differences: list[int]) -> None:
    expected = stats.permutation_test(
        (np.array(differences),), lambda x, axis: abs(x.sum(axis)), permutation_type="samples",
        n_resamples=np.inf, alternative="greater", vectorized=True,
    )  # fmt: skip
    found = sign_flip(differences, [0] * len(differences))
    assert found == pytest.approx(expected.pvalue)
