"""Runs of one algorithm, averaged: the curve that is drawn and the one that arrives somewhere.

Evaluations go by the index of their round, as in the paper: index 0 follows the first round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedzmg.evaluation import worst
from fedzmg.results import scores
from fedzmg.results.formatting import MIB
from fedzmg.results.grouping import Study
from fedzmg.results.runs import Run

RULES: tuple[scores.ThresholdRule, ...] = get_args(scores.ThresholdRule)


class Curve(NamedTuple):
    """The runs of one algorithm, averaged where all of them were evaluated."""

    indices: NDArray[np.int64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None
    """Sample standard deviation; None for a single run."""
    mib: NDArray[np.float64]
    """Traffic until each evaluation."""
    averaged: int
    broke_off: bool
    """Whether every run diverged, so that the curve ends early."""


def drawn_curve(runs: Sequence[Run]) -> Curve | None:
    """What is drawn: finished runs that lived, else what there is of the others."""
    lived = [run for run in runs if run.diverged is None]
    finished = [run for run in lived if run.complete]
    chosen = finished or lived or list(runs)
    end = min((run.diverged - 1 for run in chosen if run.diverged is not None), default=math.inf)
    shared, table = _table([_evaluations(run) for run in chosen])
    kept = [i for i, index in enumerate(shared) if index < end]
    if not kept:
        return None
    table = table[:, kept]
    indices = [shared[i] for i in kept]
    moved = [dict(zip(_evaluations(run)[0], run.log.moved, strict=True)) for run in chosen]
    return Curve(
        indices=np.array(indices),
        mean=table.mean(axis=0),
        spread=table.std(axis=0, ddof=1) if len(table) > 1 else None,
        mib=np.array([statistics.fmean(log[index] for log in moved) / MIB for index in indices]),
        averaged=len(chosen),
        broke_off=not lived,
    )


def finals(study: Study, runs: Sequence[Run]) -> dict[int, float]:
    """Final metric of every finished seed; the worst value for a run that diverged."""
    found = {}
    for run in runs:
        if run.diverged is not None:
            found[run.seed] = worst(study.higher_is_better)
        elif run.complete:
            found[run.seed] = scores.final_score(*scored(study, run), total=run.done)
    return found


def arrival(
    study: Study, runs: Sequence[Run], threshold: float, rule: scores.ThresholdRule = RULES[0]
) -> int | None:
    """Index of the round at which the averaged curve of runs reaches a threshold."""
    shared, table = _table([scored(study, run) for run in runs])
    if not shared:
        return None
    return scores.rounds_to_threshold(
        shared,
        scores.mean_curve(table),
        threshold,
        window=study.window,
        rule=rule,
        higher_is_better=study.higher_is_better,
    )


def averaged_words(window: int) -> str:
    """What has to reach a threshold, as a remark.

    >>> averaged_words(4), averaged_words(1)
    ('mean of 4 evaluations', 'one evaluation')
    """
    return f"mean of {window} evaluations" if window > 1 else "one evaluation"


def late_means(study: Study, threshold: float) -> tuple[dict[str, float], str]:
    """Means after the slowest algorithm reached a threshold, or why there are none."""
    arrivals = {label: arrival(study, runs, threshold) for label, runs in study.members.items()}
    never = [label for label, index in arrivals.items() if index is None]
    if never:
        missing = ", ".join(never[:3]) + (f" and {len(never) - 3} more" if len(never) > 3 else "")
        whether = "never holds" if len(never) == 1 else "never hold"
        if any(not run.complete for label in never for run in study.members[label]):
            whether = "has yet to hold" if len(never) == 1 else "have yet to hold"
        return {}, f"No late-stage mean: {missing} {whether} the threshold."
    every = [set(scored(study, run)[0]) for run in study.runs]
    indices = sorted(every[0].intersection(*every[1:]))
    if not indices:
        return {}, "No late-stage mean: the algorithms were evaluated after different rounds."
    found = scores.late_stage_mean(
        indices, {label: _mean_at(study, label, indices) for label in study.members}, arrivals
    )
    if found is None:
        return {}, "No late-stage mean: no evaluation follows the slowest arrival."
    return {label: value for label, value in found.items() if math.isfinite(value)}, ""


def scored(study: Study, run: Run) -> tuple[list[int], list[float]]:
    """Indices and metrics of the evaluations that count for scores.

    One that diverged and was stopped goes on with the worst value, as if it had not been stopped.
    """
    every = int(run.spec.get("protocol", {}).get("eval_every", 1))
    due = scores.scheduled(run.asked or run.done, every)
    found = {i: metric for i, metric in zip(*_evaluations(run), strict=True) if i in due}
    if run.diverged is not None:
        found |= {i: worst(study.higher_is_better) for i in due if i >= run.done}
    return list(found), list(found.values())


def _evaluations(run: Run) -> tuple[list[int], Sequence[float]]:
    return [round_ - 1 for round_ in run.log.evaluated], run.log.metrics


def _mean_at(study: Study, label: str, indices: Sequence[int]) -> NDArray[np.float64]:
    shared, table = _table([scored(study, run) for run in study.members[label]])
    column = {index: i for i, index in enumerate(shared)}
    return scores.mean_curve(table[:, [column[index] for index in indices]])


def _table(
    curves: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[list[int], NDArray[np.float64]]:
    """Indices at which all runs were evaluated, and the metrics there, one row per run."""
    logs: list[Mapping[int, float]] = [
        dict(zip(indices, metrics, strict=True)) for indices, metrics in curves
    ]
    shared = sorted(set(logs[0]).intersection(*logs[1:]))
    return shared, np.array([[log[index] for index in shared] for log in logs], dtype=float)
