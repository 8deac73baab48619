"""Scores of validation curves, and averages over the runs of one algorithm.

A curve is a list of evaluations at strictly increasing rounds, which count from 1. A run of 1000
rounds that is evaluated every five has evaluations after the rounds 1, 6, ..., 996. Runs that
diverged are left out of every average; their number is shown beside it.
"""

import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from fedzmg.results.formatting import MIB, is_share
from fedzmg.results.reading import Study
from fedzmg.results.runs import Run

ThresholdRule: TypeAlias = Literal["rolling_mean", "rolling_min", "stays_above"]
FinalRule: TypeAlias = Literal["full", "author"]
RULES: tuple[ThresholdRule, ...] = get_args(ThresholdRule)
FINAL_RULES: tuple[FinalRule, ...] = get_args(FinalRule)
SHARES = np.linspace(0.0, 1.0, 101)  # shares of clients at which sorted curves are evaluated


class Curve(NamedTuple):
    """Runs of one algorithm, averaged where all of them were evaluated."""

    rounds: NDArray[np.int64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None  # sample standard deviation; None for a single run
    mib: NDArray[np.float64]
    averaged: int
    broke_off: bool  # True if every run diverged, so that the curve ends early


class Bands(NamedTuple):
    """Median and the 10 % and 90 % quantiles over clients by round."""

    rounds: NDArray[np.float64]
    low: NDArray[np.float64]
    middle: NDArray[np.float64]
    high: NDArray[np.float64]


class Arrival(NamedTuple):
    """Rounds at which the runs of an algorithm reach a threshold; None is never."""

    averaged: int | None  # round for the curve averaged over runs
    runs: list[int | None]
    mean: float | None  # mean over the runs that reached it
    sd: float | None  # sample standard deviation over them; None for fewer than two
    never: int


def rounds_to_threshold(
    rounds: ArrayLike, values: ArrayLike, threshold: float, *, window: int = 4,
    rule: ThresholdRule = "rolling_mean", higher_is_better: bool = True,
) -> int | None:  # fmt: skip
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
    rounds: ArrayLike, values: ArrayLike, *, total: int, rule: FinalRule = "full"
) -> float:
    """Return the mean of the evaluations in the last tenth of the rounds, else the latest one.

    For 1000 rounds with an evaluation every five, the last hundred rounds hold the twenty
    evaluations 901, 906, ..., 996; the rule ``author`` leaves out the first of them. The mean is
    nan if one of the evaluations is not finite.
    """
    start = np.searchsorted(rounds, total - max(1, total // 10) + (1 if rule == "full" else 2))
    heights = np.asarray(values, dtype=np.float64)
    return _mean(heights[min(int(start), len(heights) - 1) :])


def fell_from(values: ArrayLike, final: float, *, window: int = 4) -> float | None:
    """Return the mean of a window from which a curve fell below half; None if it did not."""
    heights = np.asarray(values, dtype=np.float64)
    if len(heights) < window or not math.isfinite(final) or not np.isfinite(heights).all():
        return None
    best = float(sliding_window_view(heights, window).mean(-1).max())
    return best if final < best / 2 else None


def mean_curve(runs: ArrayLike) -> NDArray[np.float64]:
    """Average an array ``[runs, evaluations]`` over runs; nan where any run is not finite."""
    return np.array([_mean(column) for column in np.asarray(runs, dtype=np.float64).T])


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.mean(values)) if np.isfinite(values).all() else math.nan


def mean_and_sd(values: Collection[float]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation; None where there are too few values."""
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def over_seeds(
    records: Sequence[Mapping[str, Any]], labels: Iterable[str], key: str
) -> list[tuple[float | None, float | None]]:
    """Return mean and deviation of a value by algorithm; no deviation of infinite values."""
    columns = [[one[key] for one in records if one["algorithm"] == label] for label in labels]
    return [mean_and_sd(c) if all(map(math.isfinite, c)) else (sum(c), None) for c in columns]


def band_around(
    mean: NDArray[np.float64], spread: NDArray[np.float64], metric: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return one standard deviation either way; that of an accuracy is cut at 0 and 1."""
    low, high = mean - spread, mean + spread
    # An accuracy may also be counted in percent.
    if not is_share(metric) or np.any((mean < 0.0) | (mean > 1.0)):
        return low, high
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def averaged_words(window: int) -> str:
    """Describe the quantity that has to reach a threshold."""
    return f"mean of {window} evaluations" if window > 1 else "one evaluation"


def drawn_curve(runs: Sequence[Run]) -> Curve | None:
    """Average the finished runs that did not diverge, else the unfinished ones, else all."""
    lived = _lived(runs)
    chosen = [run for run in lived if run.complete] or lived or list(runs)
    end = min(run.diverged or math.inf for run in chosen)
    shared, table = _table([{r: v for r, v in run.metrics.items() if r < end} for run in chosen])
    if not shared:
        return None
    mib = np.array([statistics.fmean(run.moved[r] for run in chosen) / MIB for r in shared])
    spread = table.std(axis=0, ddof=1) if len(table) > 1 else None
    return Curve(np.array(shared), table.mean(axis=0), spread, mib, len(chosen), not lived)


def finals(runs: Sequence[Run], rule: FinalRule = "full") -> dict[int, float]:
    """Return the final metric of every seed that finished, did not diverge and is finite."""
    found = {}
    for run in (run for run in _lived(runs) if run.complete):
        rounds, values = list(run.scored), list(run.scored.values())
        found[run.seed] = final_score(rounds, values, total=run.done, rule=rule)
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def scored_table(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the rounds that count, and a row of metrics per run; None where one has none."""
    curves = [run.scored for run in runs]
    rounds = sorted(set().union(*curves, *(r.due for r in runs if r.diverged is not None)))
    return {"rounds": rounds, "runs": [[own.get(r) for r in rounds] for own in curves]}


def arrivals(
    study: Study, runs: Sequence[Run], threshold: float, rule: ThresholdRule = RULES[0]
) -> Arrival:
    """Return rounds at which runs reach a threshold, averaged over those that did not diverge."""
    reach = partial(
        rounds_to_threshold, threshold=threshold, window=study.window, rule=rule,
        higher_is_better=study.higher_is_better,
    )  # fmt: skip
    settled = rule == "stays_above"
    curves = [{} if settled and run.diverged is not None else run.scored for run in runs]
    each = [reach(list(curve), list(curve.values())) if curve else None for curve in curves]
    lived = [curve for run, curve in zip(runs, curves, strict=True) if run.diverged is None]
    shared, table = _table(lived or curves)
    known = [round_ for round_ in each if round_ is not None]
    averaged = reach(shared, mean_curve(table)) if shared else None
    return Arrival(averaged, each, *mean_and_sd(known), never=len(each) - len(known))


def late_means(
    study: Study, threshold: float, rule: ThresholdRule = RULES[0]
) -> tuple[dict[str, float], str]:
    """Return means of shared evaluations after the slowest arrival, or why there are none."""
    members = {label: runs for label, runs in study.members.items() if _lived(runs)}
    if not members:
        return {}, "No late-stage mean: every run diverged."
    reached = {k: arrivals(study, own, threshold, rule).averaged for k, own in members.items()}
    never = [label for label, round_ in reached.items() if round_ is None]
    if never:
        missing = ", ".join(never[:3]) + f" and {len(never) - 3} more" * (len(never) > 3)
        verbs = ("never hold", "never holds")
        if any(not run.complete for label in never for run in members[label]):
            verbs = ("have yet to hold", "has yet to hold")
        return {}, f"No late-stage mean: {missing} {verbs[len(never) == 1]} the threshold."
    tables = {label: _table([run.scored for run in _lived(own)]) for label, own in members.items()}
    slowest = max(round_ for round_ in reached.values() if round_ is not None)
    shared = set.intersection(*(set(rounds) for rounds, _ in tables.values()))
    late = sorted(round_ for round_ in shared if round_ > slowest)
    if not late:
        return {}, "No late-stage mean: no shared evaluation follows the slowest arrival."
    shown = {k: own[:, np.searchsorted(rounds, late)] for k, (rounds, own) in tables.items()}
    found = {label: _mean(mean_curve(table)) for label, table in shown.items()}
    return {label: value for label, value in found.items() if math.isfinite(value)}, ""


def evaluated_runs(study: Study) -> dict[str, list[Run]]:
    """Return by label the finished runs that evaluated single clients at their end."""

    def is_evaluated(run: Run) -> bool:
        return run.complete and bool(run.clients) and run.clients[-1].round == run.done

    return {k: list(filter(is_evaluated, _lived(runs))) for k, runs in study.members.items()}


def sorted_curves(runs: Sequence[Run], *, higher_is_better: bool) -> NDArray[np.float64]:
    """Return the final metric of every run's clients, worst first, at :data:`SHARES`."""
    shares = SHARES if higher_is_better else SHARES[::-1]
    return np.stack([np.quantile(run.clients[-1].metric, shares) for run in runs])


def metric_bands(runs: Sequence[Run]) -> Bands | None:
    """Average the quantiles over clients by round; None for fewer than two evaluations."""
    by_round = [{one.round: one.metric for one in run.clients} for run in runs]
    rounds = sorted(set.intersection(*map(set, by_round))) if runs else []
    if len(rounds) < 2:
        return None
    tables = [np.stack([own[round_] for round_ in rounds]) for own in by_round]
    quantiles = [np.quantile(table, (0.1, 0.5, 0.9), axis=1) for table in tables]
    return Bands(np.array(rounds, dtype=float), *np.mean(quantiles, axis=0))


def _lived(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.diverged is None]


def _table(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], NDArray[np.float64]]:
    """Return the rounds at which all runs were evaluated, and one row of metrics per run."""
    shared = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    return shared, np.array([[curve[round_] for round_ in shared] for curve in curves], dtype=float)
