"""Scores of a grid, and early stopping of its trials.

A score is the mean over seeds of the mean of the last evaluations; a diverged seed counts as the
worst value. ``stopped.jsonl`` has a line per stopped trial: round and reason.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedzmg.evaluation import Metric
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import FORMAT, Stopped
from fedzmg.results.scores import rounds_to_threshold
from fedzmg.storage.formats import append_log, log_lines, log_rows
from fedzmg.tasks.task import Task

Rows: TypeAlias = dict[tuple[int, int], dict[str, Any]]  # lines of a grid's log by trial and round


def read_rows(path: Path) -> Rows:
    """Read a grid's log by trial and round."""
    remedy = f"restore it, or remove {path.parent} to start again"
    return log_rows(path, "trial", "round", remedy=remedy)


def counted(spec: GridSpec) -> range:
    """Return the rounds whose evaluations are the score."""
    return range(spec.rounds - spec.last + 1, spec.rounds + 1)


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
        runs, diverged = list[float | None](), 0
        for trial in trials:
            found = [rows[trial, r] for r in counted(spec) if (trial, r) in rows]
            lost = trial in stops and stops[trial].why == "diverged"
            lost = lost or any(row["diverged"] for row in found)
            values = [row[field] for row in found]
            mean = statistics.fmean(values) if len(values) == spec.last else None
            diverged += lost
            runs.append(metric.worst if lost else mean)
        whole = [run for run in runs if run is not None]
        return statistics.fmean(whole) if len(whole) == len(runs) else None, runs, diverged

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
    tried = {trial // seeds for trial in (*(trial for trial, _ in rows), *stops)}
    for i, options in enumerate(points):
        trials = range(i * seeds, (i + 1) * seeds)
        mean, runs, diverged = scored(trials, "metric")
        listed.append({"options": options, "score": mean, "runs": runs, "diverged": diverged})
        if spec.also_by_test:
            listed[-1]["test_score"] = scored(trials, "test_metric")[0]
        if any(t in stops for t in trials):
            listed[-1]["stopped"] = [stops[t]._asdict() if t in stops else None for t in trials]
    found = {
        "format": FORMAT, "algorithm": spec.base(name), "label": spec.shown(name),
        "fixed": spec.fixed(name), "weights": spec.algorithms[name].weights, "axes": axes,
        "points": [p for i, p in enumerate(listed) if i in tried or spec.search.method == "grid"],
        "best": best("score"),
    }  # fmt: skip
    if spec.also_by_test:
        found["best_by_test"] = best("test_score")
    if spec.thresholds:
        found["soonest"] = soonest(spec, points, rows, higher_is_better=metric.higher_is_better)
    if spec.stop.diverged or spec.search.halving:
        asked = spec.rounds * spec.trials(name)
        found["stopped"] = {
            **dict(Counter[str](stop.why for stop in stops.values())),
            "rounds": asked - sum(spec.rounds - stop.round for stop in stops.values()),
            "rounds_asked": asked,
        }
    return found


def choose_best(
    shape: Sequence[int], scores: Sequence[float | None], diverged: Sequence[int], *,
    higher: bool = True,
) -> int | None:  # fmt: skip
    """Return the best point with a score, of equals that with better neighbours, or None."""
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
    """Return the points one step away along one axis, the last axis running fastest."""
    found, stride = [], math.prod(shape)
    for size in shape:
        stride //= size
        position = point // stride % size
        found += [point + step * stride for step in (-1, 1) if 0 <= position + step < size]
    return found


def soonest(
    spec: GridSpec, points: Sequence[Mapping[str, float]], rows: Rows, *, higher_is_better: bool
) -> list[dict[str, Any]]:
    """Return for every threshold the point that reaches it first under the first seed."""
    rounds, seeds = range(1, spec.rounds + 1, spec.eval_every), len(spec.seeds)
    found = []
    for threshold in spec.thresholds:
        reached: dict[int, int] = {}
        for i in range(len(points)):
            at = [r for r in rounds if (i * seeds, r) in rows]
            values = [rows[i * seeds, r]["metric"] for r in at]
            first = rounds_to_threshold(at, values, threshold, higher_is_better=higher_is_better)
            reached |= {} if first is None else {i: first}
        best = min(reached, key=lambda i: reached[i]) if reached else None
        fact = {} if best is None else {"options": points[best], "round": reached[best]}
        found.append({"threshold": threshold, **fact})
    return found


class Stops:
    """Early-stopping decisions about one algorithm's trials."""

    def __init__(self, spec: GridSpec, name: str, metric: Metric, path: Path) -> None:
        self._spec, self._metric, self._path = spec, metric, path
        self._facts = [{"seed": s, **point} for point in spec.points(name) for s in spec.seeds]
        lines = log_lines(path, lambda line: (int(line["trial"]), Stopped.of(line)))
        self.now: dict[int, Stopped] = dict(lines)  # decisions by trial

    def keep(self, found: Mapping[int, Stopped]) -> None:
        new = {trial: stopped for trial, stopped in found.items() if trial not in self.now}
        if new:
            lines = [{"trial": t, **self._facts[t], **one._asdict()} for t, one in new.items()]
            append_log(self._path, lines)
            self.now |= new

    def halved(self, rows: Rows, firsts: Sequence[int], round_: int) -> dict[int, Stopped]:
        """Return the trials of points, by their first ones, that do not continue after this round.

        The first seed of a point decides. Its other seeds, which never began, stop at round 0.
        """
        keep = next((n for end, n in self._spec.search.halving if end == round_), None)
        if keep is None:
            return {}
        seeds, sign = len(self._spec.seeds), 1 if self._metric.higher_is_better else -1
        # Without later decisions, rounds that are repeated after a crash are judged as before.
        left = [t for t in firsts if t not in self.now or self.now[t].round >= round_]
        window = range(round_ - self._spec.last + 1, round_ + 1)
        scores = {t: statistics.fmean(rows[t, r]["metric"] for r in window) for t in left}
        # The sort is stable: the first of equals continue.
        order = sorted(left, key=lambda t: (rows[t, round_]["diverged"], -sign * scores[t]))
        words = f"not among the best {keep} of {len(order)} points after round {round_}"
        return {
            trial: Stopped(round_ * (trial == first), "halving", words, scores.get(first))
            for first in firsts
            if first not in order[:keep]
            for trial in range(first, first + seeds)
        }
