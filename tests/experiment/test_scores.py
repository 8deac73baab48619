"""Scores of validation curves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedzmg.results.reading import group_study
from fedzmg.results.runs import Run, scheduled
from fedzmg.results.scores import (
    ThresholdRule,
    fell_from,
    final_score,
    late_means,
    mean_curve,
    rounds_to_threshold,
)

RISING = [2.0, 8.0, 16.0, 24.0, 30.0, 34.0, 36.0, 35.0, 37.0, 38.0]
DIPPING = [10.0, 30.0, 36.0, 36.0, 36.0, 20.0, 20.0, 36.0, 36.0, 36.0, 36.0, 37.0]
RULES: list[ThresholdRule] = ["rolling_mean", "rolling_min", "stays_above"]

values_lists = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30)
windows = st.integers(1, 6)
thresholds = st.floats(0.0, 1.0)


def every_five(values: list[float]) -> list[int]:
    """Return the rounds 1, 6, 11, ... of as many evaluations."""
    return [5 * i + 1 for i in range(len(values))]


def arrival(values: list[float], threshold: float, **options: Any) -> int | None:
    """Return the arrival of a curve evaluated every five rounds."""
    return rounds_to_threshold(every_five(values), values, threshold, **options)


def or_infinity(answer: int | None) -> float:
    """Return the answer, with infinity for never."""
    return math.inf if answer is None else answer


@pytest.mark.parametrize(
    ("values", "threshold", "rule", "expected"),
    [
        (RISING, 20.0, "rolling_mean", 26),
        (RISING, 33.0, "rolling_mean", 36),
        (RISING, 20.0, "rolling_min", 31),
        (RISING, 33.0, "rolling_min", 41),
        (DIPPING, 30.0, "rolling_mean", 21),
        (DIPPING, 30.0, "rolling_min", 21),
        (DIPPING, 30.0, "stays_above", 46),
    ],
)
def test_threshold_reference_curves(
    values: list[float], threshold: float, rule: ThresholdRule, expected: int
) -> None:
    assert arrival(values, threshold, rule=rule) == expected


@pytest.mark.parametrize("rule", RULES)
def test_threshold_earliest_answer_is_the_end_of_the_first_window(rule: ThresholdRule) -> None:
    assert arrival([1.0] * 10, 0.5, rule=rule) == 16
    assert arrival([0.1] * 10, 0.5, rule=rule) is None
    assert arrival([1.0] * 3, 0.5, rule=rule) is None  # shorter than the window


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", range(1, 8))
@pytest.mark.parametrize("level", [0.1, 0.33, 0.7, 1e-3, 1e300])
def test_threshold_touching_counts_whatever_the_rounding(
    rule: ThresholdRule, window: int, level: float
) -> None:
    assert arrival([level] * 8, level, rule=rule, window=window) == 5 * (window - 1) + 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_threshold_window_with_a_non_finite_value_never_qualifies(
    rule: ThresholdRule, bad: float
) -> None:
    values = [1.0, bad, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert arrival(values, 0.5, rule=rule) == 26
    assert arrival([bad] * 7, 0.5, rule=rule) is None


def test_threshold_divergence_after_arrival_breaks_only_stays_above() -> None:
    values = [1.0] * 6 + [math.nan]
    assert arrival(values, 0.5, rule="rolling_mean") == 16
    assert arrival(values, 0.5, rule="rolling_min") == 16
    assert arrival(values, 0.5, rule="stays_above") is None


def test_threshold_means_that_tie_up_to_rounding_count() -> None:
    """The mean is 0.8; as a sum of floats it is 0.7999999999999999."""
    assert rounds_to_threshold([0, 5, 10, 15], [0.755, 0.845, 0.78, 0.82], 0.8) == 15
    assert rounds_to_threshold([0, 5], [0.3, 0.1 + 0.2], 0.3, window=1, higher_is_better=False) == 0
    below = 0.8 * (1 - 1e-12)
    assert rounds_to_threshold([0, 5, 10, 15], [below] * 4, 0.8) is None


@given(values_lists, thresholds, windows, st.sampled_from(RULES))
def test_threshold_falling_metric_mirrors_rising(
    values: list[float], threshold: float, window: int, rule: ThresholdRule
) -> None:
    rising = arrival(values, threshold, window=window, rule=rule)
    mirrored = [-value for value in values]
    falling = arrival(mirrored, -threshold, window=window, rule=rule, higher_is_better=False)
    assert rising == falling


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=30),
    thresholds,
    windows,
    st.sampled_from(RULES),
)
def test_threshold_raising_a_curve_never_delays(
    pairs: list[tuple[float, float]], threshold: float, window: int, rule: ThresholdRule
) -> None:
    low = [min(pair) for pair in pairs]
    high = [max(pair) for pair in pairs]
    options: dict[str, Any] = {"window": window, "rule": rule}
    assert or_infinity(arrival(high, threshold, **options)) <= or_infinity(
        arrival(low, threshold, **options)
    )


@given(values_lists, thresholds, windows)
def test_threshold_mean_is_the_most_lenient_rule(
    values: list[float], threshold: float, window: int
) -> None:
    mean, minimum, stays = (
        or_infinity(arrival(values, threshold, window=window, rule=rule)) for rule in RULES
    )
    assert mean <= minimum
    assert mean <= stays


@pytest.mark.parametrize(
    ("total", "every", "expected"),
    [
        (1000, 5, np.mean(np.arange(901, 1001, 5))),
        (100, 5, np.mean([91, 96])),
        (40, 5, 36),  # the tenth, rounds 37 to 40, holds no evaluation
        (5, 1, 5),
        (1, 1, 1),
    ],
)
def test_final_score_window(total: int, every: int, expected: float) -> None:
    rounds = np.arange(1, total + 1, every)
    assert final_score(rounds, rounds, total=total) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_final_score_of_a_diverged_run_is_nan(bad: float) -> None:
    assert math.isnan(final_score([1, 19, 20], [0.1, bad, -bad], total=20))
    assert final_score([1, 19, 20], [bad, 0.25, 0.75], total=20) == 0.5


@given(total=st.integers(1, 300), every=st.integers(1, 400))
def test_what_counts_is_due_or_the_end(total: int, every: int) -> None:
    rounds, regular = list(scheduled(total, every)), set(range(1, total + 1, every))
    assert rounds == sorted(set(rounds))
    assert regular <= set(rounds) <= regular | {total}
    assert total - rounds[-1] < max(1, total // 10)


@pytest.mark.parametrize(
    ("values", "final", "expected"),
    [
        ([0.1, 0.8, 0.8, 0.1, 0.1], 0.1, 0.8),
        ([0.1, 0.8, 0.8, 0.4, 0.4], 0.4, None),  # exactly half is kept
        ([0.0, 0.0, 1.0, 0.0, 0.3], 0.3, None),  # one lucky evaluation is no height
        ([0.1, 0.2, 0.3, 0.4, 0.5], 0.5, None),
        ([0.8, 0.8, math.nan, 0.1, 0.1], 0.1, None),  # that one diverged, which is said elsewhere
        ([0.8], 0.1, None),
    ],
)
def test_falling_back(values: list[float], final: float, expected: float | None) -> None:
    assert fell_from(values, final, window=2) == expected


def test_mean_curve_marks_what_a_diverged_run_spoils() -> None:
    averaged = mean_curve([[0.0, 1.0, 2.0], [1.0, math.nan, math.inf], [2.0, 1.0, -math.inf]])
    np.testing.assert_array_equal(averaged, [1.0, np.nan, np.nan])


def late(curves: dict[str, list[float]], threshold: float) -> dict[str, float]:
    """Return the late-stage means of one run each, a single evaluation being a window."""
    runs = []
    for label, values in curves.items():
        protocol = {"rounds": every_five(values)[-1], "eval_every": 5}
        spec = {"task": "toy", "algorithm": label, "seed": 0, "protocol": protocol}
        metrics = dict(zip(every_five(values), values, strict=True))
        log = (max(metrics), 0, None, metrics, {}, {}, 0.0)
        runs.append(Run("", "", spec, {}, *log, label=label))
    return late_means(group_study(runs, {"window": 1}, []), threshold)[0]


def test_late_stage_counts_only_after_the_slowest() -> None:
    curves = {"fast": [5.0, 2.0, 3.0, 4.0], "slow": [0.0, 6.0, 5.0, 7.0]}
    assert late(curves, 5.0) == {"fast": 3.5, "slow": 6.0}
    assert late(curves, 4.5) == late(curves, 5.0)
    assert late({**curves, "last": [0.0, 0.0, 8.0, 9.0]}, 5.0) == {"fast": 4, "slow": 7, "last": 9}


def test_late_stage_undefined() -> None:
    assert late({"a": [1.0, 2.0], "b": [0.0, 0.0]}, 1.0) == {}  # b never reaches it
    assert late({"a": [1.0, 2.0], "b": [0.0, 2.0]}, 1.0) == {}  # nothing follows
    assert late({"a": [1.0, math.nan], "b": [1.0, 2.0]}, 1.0) == {"b": 2.0}
