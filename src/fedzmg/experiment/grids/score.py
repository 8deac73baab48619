"""Scores of a grid, and early stopping of its trials.

A score is the mean over seeds of the mean of the last evaluations; a diverged seed counts as the
worst value. The evaluations so far bound it on both sides. Sums are exact before they are rounded
and rounding is monotonic, so the bounds hold for the very numbers that the scores will be.

``stopped.jsonl`` has a line per decision: trial, round, reason. A line with ``revoked`` takes a
decision back when a point might win after all.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedzmg.errors import InputError
from fedzmg.evaluation import Metric, worst
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import FORMAT, Stopped
from fedzmg.storage.formats import append_log, log_lines
from fedzmg.tasks.task import Task

Rows: TypeAlias = dict[tuple[int, int], dict[str, Any]]
"""Lines of a grid's log by trial and round."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a grid's log in the order of writing."""
    return log_lines(path, _parsed, f"restore it, or remove {path.parent} to start again")


def read_rows(path: Path) -> Rows:
    """Read a grid's log by trial and round; a later line supersedes an earlier one."""
    return {(line["trial"], line["round"]): line for line in read_lines(path)}


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    int(values["trial"]), int(values["round"])
    for name in ("metric", "test_metric", "loss", "train_loss", "seconds"):
        if values.get(name) is not None:
            float(values[name])
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in values.items()}


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
    spec: GridSpec,
    name: str,
    task: Task,
    rows: Rows,
    stops: Mapping[int, Stopped],
    unusual: Mapping[int, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Return the scores of an algorithm's grid, ready for JSON.

    ``stops`` are trials that were stopped early. A point that diverged has the worst score, other
    stopped points have none. ``unusual`` are clients with unusual uploads, by point.
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
    tried = {trial // seeds for trial in (*(trial for trial, _ in rows), *stops)}
    for i, options in enumerate(points):
        trials = range(i * seeds, (i + 1) * seeds)
        mean, runs, diverged = scored(trials, "metric")
        listed.append({"options": options, "score": mean, "runs": runs, "diverged": diverged})
        if spec.also_by_test:
            listed[-1]["test_score"] = scored(trials, "test_metric")[0]
        # The uploads of a diverged model say nothing about its clients.
        if i in unusual and not diverged:
            listed[-1]["unusual"] = unusual[i]
        if any(t in stops for t in trials):
            listed[-1]["stopped"] = [stops[t].line() if t in stops else None for t in trials]
    found = {
        "format": FORMAT,
        "algorithm": spec.base(name),
        "label": spec.shown(name),
        "fixed": spec.fixed(name),
        "weights": spec.algorithms[name].weights,
        "axes": axes,
        "points": [p for i, p in enumerate(listed) if i in tried or spec.search == "grid"],
        "best": best("score"),
    }
    if spec.also_by_test:
        found["best_by_test"] = best("test_score")
    if spec.stops:
        asked = spec.rounds * spec.trials(name)
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


Merit: TypeAlias = tuple[bool, float]
"""Sort key of points: True if no seed is lost, then the score, negated if lower is better."""


class Rule(NamedTuple):
    """Scoring rule of a grid."""

    last: int
    """Number of evaluations that count."""
    best: float
    """Best possible value of the metric."""
    higher: bool = True

    @property
    def worst(self) -> float:
        """Score of a diverged trial, and the lower bound of an evaluation."""
        return worst(self.higher)

    def sign(self, value: float) -> float:
        """Convert between scores and heights."""
        return value if self.higher else -value

    def merit(self, seeds: Sequence[Known], rest: float) -> Merit:
        """Return a point's merit if every evaluation to come were ``rest``."""
        each = [
            self.worst if lost else statistics.fmean([*values, *[rest] * (self.last - len(values))])
            for values, lost in seeds
        ]
        return not any(s.lost for s in seeds), self.sign(statistics.fmean(each))

    def broken(self, points: Iterable[Sequence[Known]]) -> bool:
        """Return whether an evaluation is better than the best possible value."""
        best = self.sign(self.best)
        return any(self.sign(v) > best for seeds in points for one in seeds for v in one.values)


def dominated(
    rule: Rule, points: Sequence[Sequence[Known]], stopped: Collection[int]
) -> dict[int, Merit]:
    """Return points that cannot win any more, with their upper bound.

    ``points`` has the evaluations of every point's seeds; ``stopped`` points beat no other.
    """
    left = {i: seeds for i, seeds in enumerate(points) if i not in stopped}
    if not left or rule.broken(points):
        return {}
    bar = max(rule.merit(seeds, rule.worst) for seeds in left.values())
    tops = {i: rule.merit(seeds, rule.best) for i, seeds in left.items()}
    return {i: top for i, top in tops.items() if top < bar}


def unsettled(
    rule: Rule,
    points: Sequence[Sequence[Known]],
    stopped: Collection[int],
    others: Collection[int],
    near: Mapping[int, Sequence[int]],
) -> list[int]:
    """Return ``stopped`` points, which could not win, whose score is needed after all.

    ``others`` were stopped for other reasons and have no score. ``near`` has the neighbours of
    every point; they break ties.
    """
    done = [i for i in range(len(points)) if i not in stopped and i not in others]
    merits = {i: rule.merit(points[i], rule.worst) for i in done}
    if not merits or rule.broken(points):
        return sorted(stopped)
    best = max(merits.values())
    found = {i for i in stopped if rule.merit(points[i], rule.best) >= best}
    equals = [i for i in done if merits[i] == best]
    if len(equals) > 1:
        found |= {n for i in equals for n in near[i] if n in stopped}
    return sorted(found)


class Stops:
    """Early-stopping decisions about one algorithm's trials."""

    def __init__(self, spec: GridSpec, name: str, metric: Metric, path: Path) -> None:
        self._spec, self._path, bound = spec, path, spec.stop.best_possible
        if spec.stop.cannot_win and bound is None and metric.name != "accuracy":
            raise InputError(f"stop.cannot_win: set stop.best_possible for {metric.name!r}")
        self._rule = Rule(spec.last, 1.0 if bound is None else bound, metric.higher_is_better)
        self._shape = [len(values) for values in spec.axes_of(name).values()]
        points, self._seeds = spec.points(name), len(spec.seeds)
        self._facts = [{"seed": seed, **point} for point in points for seed in spec.seeds]
        self._trials = [range(p * self._seeds, (p + 1) * self._seeds) for p in range(len(points))]
        """Trials of every point, one per seed."""
        self.now: dict[int, Stopped] = {}
        """Valid decisions by trial."""
        self.revoked: set[int] = set()
        """Trials that were stopped and are trained to the end after all."""
        try:
            self._take(read_lines(path))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged ({error}): restore it") from None

    def _take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            self.now[line["trial"]] = Stopped.of(line)
            if line.get("revoked"):
                del self.now[line["trial"]]
                self.revoked.add(line["trial"])

    def keep(self, found: Mapping[int, Stopped]) -> None:
        """Record new decisions."""
        new = [(t, stopped) for t, stopped in found.items() if t not in self.now]
        self._write([{"trial": t, **self._facts[t], **stopped.line()} for t, stopped in new])

    def revoke(self, trials: Collection[int]) -> None:
        """Take decisions back; these trials start again and are not stopped any more."""
        self._write([{"trial": t, **self.now[t].line(), "revoked": True} for t in trials])

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if lines:
            append_log(self._path, lines)
            self._take(lines)

    def dominated(
        self, rows: Rows, members: Iterable[int], round_: int, lost: Collection[int]
    ) -> dict[int, Stopped]:
        """Return trials of points that cannot win any more, including trials that never began.

        The pack of ``members`` is at ``round_``; later rounds of its log are about to be repeated.
        ``lost`` trials have diverged, which the log may not show yet.
        """
        within = set(members)
        points = self._known(rows, dict.fromkeys(within, round_), lost)
        settled = [p for p, why in enumerate(self._reasons(round_)) if why - {"diverged"}]
        found: dict[int, Stopped] = {}
        for point, (intact, height) in dominated(self._rule, points, settled).items():
            at_most = self._rule.sign(height)
            why = f"its score is at most {at_most:.6g}" if intact else "one of its seeds diverged"
            words = f"{why}, and another point is certainly better"
            for trial, seed in zip(self._trials[point], points[point], strict=True):
                if trial not in self.now and (trial in within or not seed.values):
                    at = round_ if trial in within else 0
                    found[trial] = Stopped(at, "cannot_win", words, at_most)
        return found

    def worse_half(self, rows: Rows, members: Collection[int], round_: int) -> dict[int, Stopped]:
        """Return trials of the pack's points that a halving after this round stops: a heuristic."""
        before = {t for t, stopped in self.now.items() if stopped.round < round_}
        heights = {
            point: self._rule.sign(
                sum(self._rule.worst if t in before else rows[t, round_]["metric"] for t in trials)
            )
            for point, trials in enumerate(self._trials)
            if trials[0] in members and not before.issuperset(trials)
        }
        # The sort is stable: the first of equals continue.
        order = sorted(heights, key=lambda point: -heights[point])
        kept = -(-len(order) // 2)
        words = f"heuristic: not in the better half, {kept} of {len(order)} points, after round "
        return {
            trial: Stopped(round_, "halving", f"{words}{round_}")
            for point in order[kept:]
            for trial in self._trials[point]
            if trial not in self.now
        }

    def unsettled(self, rows: Rows) -> list[int]:
        """Return trials that have to be trained to the end after all."""
        points, reasons = self._known(rows, {}, ()), self._reasons(self._spec.rounds + 1)
        stopped = [p for p, why in enumerate(reasons) if "cannot_win" in why]
        others = [p for p, why in enumerate(reasons) if "halving" in why]
        near = {p: neighbours(self._shape, p) for p in range(len(points))}
        return [
            t
            for p in unsettled(self._rule, points, stopped, others, near)
            for t in self._trials[p]
            if t in self.now and self.now[t].why == "cannot_win"
        ]

    def _reasons(self, round_: int) -> list[set[str]]:
        """Return the reasons why trials of each point were stopped before a round."""
        # Without later decisions, rounds that are repeated after a crash are judged as before.
        earlier = {t: s.why for t, s in self.now.items() if s.round < round_}
        return [{earlier[t] for t in trials if t in earlier} for trials in self._trials]

    def _known(
        self, rows: Rows, until: Mapping[int, int], lost: Collection[int]
    ) -> list[list[Known]]:
        def one(trial: int) -> Known:
            found = known(self._spec, trial, rows, self.now.get(trial), until.get(trial))
            return found._replace(lost=found.lost or trial in lost)

        return [[one(trial) for trial in trials] for trials in self._trials]
