"""Scores of a grid: one number per point, the best point and its neighbours."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.experiment.plan_directory import FORMAT, Rows
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import Stopped
from fedzmg.tasks.task import Task


class Known(NamedTuple):
    """Evaluations of one trial so far."""

    values: list[float]
    """Evaluations that count."""
    lost: bool = False
    """True if the trial has diverged."""


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
    if stopped is not None and stopped.why == "diverged" and stopped.round <= end:
        return Known([], lost=True)
    end = end if stopped is None else min(end, stopped.round)
    found = [rows[trial, r] for r in counted(spec) if r <= end and (trial, r) in rows]
    return Known([row[field] for row in found], any(row["diverged"] for row in found))


def score(
    spec: GridSpec, name: str, task: Task, rows: Rows, stops: Mapping[int, Stopped]
) -> dict[str, Any]:
    """Return the scores of an algorithm's grid, ready for JSON.

    ``stops`` are trials that were stopped early. A point that diverged has the worst score, other
    stopped points have none.
    """
    axes, points, seeds = spec.axes_of(name), spec.points(name), len(spec.seeds)
    shape, metric = [len(values) for values in axes.values()], task.metric

    def scored(trials: Iterable[int], field: str) -> tuple[float | None, list[float | None], int]:
        """Return a point's score, None if unknown, that of every seed, and how many diverged."""
        each = [known(spec, t, rows, stops.get(t), field=field) for t in trials]
        runs = [
            metric.worst if lost else statistics.fmean(values) if len(values) == spec.last else None
            for values, lost in each
        ]
        whole = [run for run in runs if run is not None]
        mean = statistics.fmean(whole) if len(whole) == len(runs) else None
        return mean, runs, sum(lost for _, lost in each)

    def best(field: str) -> dict[str, Any] | None:
        values, lost = [p[field] for p in listed], [p["diverged"] for p in listed]
        chosen = choose_best(shape, values, lost, higher=metric.higher_is_better)
        if chosen is None:
            return None
        options = points[chosen]
        edges = [k for k, v in axes.items() if len(v) > 1 and options[k] in (v[0], v[-1])]
        around = [{"options": points[n], "score": values[n]} for n in neighbours(shape, chosen)]
        return {
            "options": options, "score": values[chosen], "neighbours": around,
            "border": bool(edges), "border_axes": edges,
        }  # fmt: skip

    listed: list[dict[str, Any]] = []
    for i, options in enumerate(points):
        trials = range(i * seeds, (i + 1) * seeds)
        mean, runs, diverged = scored(trials, "metric")
        listed.append({"options": options, "score": mean, "runs": runs, "diverged": diverged})
        if spec.also_by_test:
            listed[-1]["test_score"] = scored(trials, "test_metric")[0]
        if any(t in stops for t in trials):
            listed[-1]["stopped"] = [stops[t].line() if t in stops else None for t in trials]
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
        found["stopped"] = {
            **dict(Counter[str](stop.why for stop in stops.values())),
            "rounds": asked - sum(spec.rounds - stop.round for stop in stops.values()),
            "rounds_asked": asked,
        }
    return found


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


def chosen_options(
    name: str, entry: Mapping[str, Any], best: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fixed options of an entry of ``grid.json`` and those of the chosen point."""
    if best is None:
        raise InputError(f"every point of {name} diverged: search smaller learning rates")
    weights = {"weights": entry["weights"]} if entry.get("weights") else {}
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
