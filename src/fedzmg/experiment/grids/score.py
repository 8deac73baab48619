"""Scores of a grid: one number per point, the best point and its neighbours."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedzmg.errors import InputError
from fedzmg.experiment.early_stopping import Known, Stopped
from fedzmg.experiment.plan_directory import FORMAT, Rows
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.tasks.task import Task


def counted(spec: GridSpec) -> range:
    """Return the rounds whose evaluations count."""
    return range(spec.rounds - spec.last + 1, spec.rounds + 1)


def known(
    spec: GridSpec,
    trial: int,
    rows: Rows,
    stopped: Stopped | None = None,
    until: int | None = None,
    field: str = "metric",
) -> Known:
    """Return a trial's logged evaluations, up to a round."""
    end = spec.rounds if until is None else until
    if stopped is not None:
        end = min(end, stopped.round)
        if stopped.why == "diverged" and stopped.round <= end:
            return Known([], lost=True)
    found = [rows[trial, r] for r in counted(spec) if r <= end and (trial, r) in rows]
    return Known([row[field] for row in found], any(row["diverged"] for row in found))


def score(
    spec: GridSpec, name: str, task: Task, rows: Rows, stops: Mapping[int, Stopped] | None = None
) -> dict[str, Any]:
    """Return the scores of an algorithm's grid, ready for JSON.

    Args:
        spec: the grid.
        name: the algorithm.
        task: for its metric.
        rows: the log.
        stops: trials that were stopped early. A point that diverged has the worst score, other
            stopped points have none.
    """
    stops = stops or {}
    axes, points, seeds = spec.axes_of(name), spec.points(name), len(spec.seeds)
    higher, worst = task.metric.higher_is_better, task.metric.worst
    listed: list[dict[str, Any]] = []
    for i, options in enumerate(points):
        trials = range(i * seeds, (i + 1) * seeds)
        runs, diverged = _runs(spec, trials, rows, stops, worst)
        point: dict[str, Any] = {
            "options": options, "score": _mean(runs), "runs": runs, "diverged": diverged,
        }  # fmt: skip
        if spec.also_by_test:
            point["test_score"] = _mean(_runs(spec, trials, rows, stops, worst, "test_metric")[0])
        if any(t in stops for t in trials):
            point["stopped"] = [stops[t].line() if t in stops else None for t in trials]
        listed.append(point)

    def best(field: str) -> dict[str, Any] | None:
        values, lost = [p[field] for p in listed], [p["diverged"] for p in listed]
        chosen = choose_best([len(v) for v in axes.values()], values, lost, higher=higher)
        return None if chosen is None else _described(axes, points, values, chosen)

    found = {
        "format": FORMAT,
        "algorithm": spec.base(name),
        "label": spec.shown(name),
        "fixed": spec.fixed(name),
        "weights": spec.algorithms[name].weights,
        "axes": axes,
        "points": listed,
        "best": best("score"),
    }
    if spec.also_by_test:
        found["best_by_test"] = best("test_score")
    if spec.stops:
        asked = spec.rounds * len(points) * seeds
        reasons: dict[str, int] = Counter(stop.why for stop in stops.values())
        found["stopped"] = {
            **reasons,
            "rounds": asked - sum(spec.rounds - stop.round for stop in stops.values()),
            "rounds_asked": asked,
        }
    return found


def _runs(
    spec: GridSpec,
    trials: Iterable[int],
    rows: Rows,
    stops: Mapping[int, Stopped],
    worst: float,
    field: str = "metric",
) -> tuple[list[float | None], int]:
    """Return a point's score under every seed, None if unknown, and how many diverged."""
    each = [known(spec, t, rows, stops.get(t), field=field) for t in trials]
    runs = [
        worst if lost else statistics.fmean(values) if len(values) == spec.last else None
        for values, lost in each
    ]
    return runs, sum(lost for _, lost in each)


def _mean(runs: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None if one of them has no score."""
    scores = [run for run in runs if run is not None]
    return statistics.fmean(scores) if len(scores) == len(runs) else None


def choose_best(
    shape: Sequence[int],
    scores: Sequence[float | None],
    diverged: Sequence[int],
    *,
    higher: bool = True,
) -> int | None:
    """Return the best point of a grid; of equals the one with better neighbours, then the first.

    None if every point diverged; a point without a score is not chosen.

    >>> choose_best([3], [0.5, 0.9, 0.9], [0, 0, 0])
    2
    >>> choose_best([2, 2], [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]) is None
    True
    """
    sign = 1 if higher else -1
    known = {i: score for i, score in enumerate(scores) if score is not None}

    def merit(i: int) -> tuple[float, float]:
        around = [sign * known[n] for n in neighbours(shape, i) if n in known]
        return sign * known[i], statistics.fmean(around) if around else 0.0

    alive = [i for i in known if not diverged[i]]
    alive = alive or [i for i, s in known.items() if math.isfinite(s) and s > 0]
    # max() keeps the first of equals.
    return max(alive, key=merit) if alive else None


def neighbours(shape: Sequence[int], point: int) -> list[int]:
    """Return the points one step away along one axis, the last axis running fastest.

    >>> neighbours([3, 3], 4), neighbours([3, 3], 0)
    ([1, 7, 3, 5], [3, 1])
    """
    found, stride = [], math.prod(shape)
    for size in shape:
        stride //= size
        position = point // stride % size
        found += [point + step * stride for step in (-1, 1) if 0 <= position + step < size]
    return found


def _described(
    axes: Mapping[str, Sequence[float]],
    points: Sequence[Mapping[str, float]],
    scores: Sequence[float | None],
    best: int,
) -> dict[str, Any]:
    edges = [
        key
        for key, values in axes.items()
        if len(values) > 1 and points[best][key] in (values[0], values[-1])
    ]
    around = neighbours([len(v) for v in axes.values()], best)
    return {
        "options": points[best],
        "score": scores[best],
        "neighbours": [{"options": points[n], "score": scores[n]} for n in around],
        "border": bool(edges),
        "border_axes": edges,
    }


def chosen_options(
    name: str, entry: Mapping[str, Any], best: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the options that a search gives an algorithm: the fixed ones and the best point.

    Args:
        name: the algorithm, for the message.
        entry: its entry in ``grid.json``.
        best: the chosen point.

    Raises:
        InputError: if no point was chosen.
    """
    if best is None:
        raise InputError(f"every point of {name} diverged: search smaller learning rates")
    # Older grids lack the weights.
    weights = {} if entry.get("weights") is None else {"weights": entry["weights"]}
    return {**weights, **entry["fixed"], **best["options"]}


def warnings(data: Mapping[str, Any]) -> list[str]:
    """Return warnings about a grid: borders, algorithms that only diverged, heuristics.

    A line does not begin with an algorithm, because the command's name is put before it.
    """
    found = []
    for name, entry in data["algorithms"].items():
        best = entry["best"]
        if best is None:
            found.append(f"every point of {name} diverged; search smaller learning rates")
        elif best["border"]:
            edges = ", ".join(f"{key} = {best['options'][key]:.4g}" for key in best["border_axes"])
            found.append(
                f"the best point of {name} lies on the border ({edges}); a wider grid may do better"
            )
        other = entry.get("best_by_test")
        if best is not None and other is not None and other["options"] != best["options"]:
            options = ", ".join(f"{key} = {value:.4g}" for key, value in other["options"].items())
            found.append(
                f"for {name} the whole test set, by which the paper chooses, would choose {options}"
            )
        halved = entry.get("stopped", {}).get("halving", 0)
        if halved:
            found.append(
                f"{halved} trials of {name} were stopped by a heuristic (heuristic_halving); one "
                "of them might have won"
            )
    return found
