"""Early stopping of a grid's trials, and the file that records it.

``stopped.jsonl`` has a line per decision: trial, round, reason. A line with ``revoked`` takes a
decision back when a point might win after all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.evaluation import Metric
from fedzmg.experiment.early_stopping import Known, Rule, Stopped, dominated, unsettled
from fedzmg.experiment.grids.score import known, neighbours
from fedzmg.experiment.plan_directory import Rows, read_lines
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.storage.formats import append_log


class Stops:
    """Early-stopping decisions about one algorithm's trials."""

    def __init__(self, spec: GridSpec, name: str, metric: Metric, path: Path) -> None:
        self._spec, self._path = spec, path
        self._rule = Rule(spec.last, _bound(spec, metric), metric.higher_is_better)
        self._shape = [len(values) for values in spec.axes_of(name).values()]
        self._seeds, self._points = len(spec.seeds), len(spec.points(name))
        self.now: dict[int, Stopped] = {}
        """Valid decisions by trial."""
        self.revoked: set[int] = set()
        """Trials that were stopped and are trained to the end after all."""
        for line in read_lines(path):
            try:
                self._take(line["trial"], Stopped.of(line), revoked=bool(line.get("revoked")))
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path} is damaged ({error}): restore it") from None

    def _take(self, trial: int, stopped: Stopped, *, revoked: bool = False) -> None:
        if revoked:
            self.now.pop(trial, None)
            self.revoked.add(trial)
        else:
            self.now[trial] = stopped

    def keep(self, found: Mapping[int, Stopped], facts: Sequence[Mapping[str, Any]]) -> None:
        """Record new decisions; ``facts`` describes every trial."""
        new = {trial: stopped for trial, stopped in found.items() if trial not in self.now}
        if new:
            lines = ({"trial": t, **facts[t], **s.line()} for t, s in new.items())
            append_log(self._path, lines)
        for trial, stopped in new.items():
            self._take(trial, stopped)

    def revoke(self, trials: Collection[int]) -> None:
        """Take decisions back; these trials start again and are not stopped any more."""
        if trials:
            lines = ({"trial": t, **self.now[t].line(), "revoked": True} for t in trials)
            append_log(self._path, lines)
        for trial in trials:
            self._take(trial, self.now[trial], revoked=True)

    def trials_of(self, point: int) -> range:
        """Return the trials of a point, one per seed."""
        return range(point * self._seeds, (point + 1) * self._seeds)

    def dominated(
        self, rows: Rows, members: Iterable[int], round_: int, lost: Iterable[int]
    ) -> dict[int, Stopped]:
        """Return trials of points that cannot win any more, including trials that never began.

        The pack of ``members`` is at ``round_``; later rounds of its log are about to be repeated.
        ``lost`` trials have diverged, which the log may not show yet.
        """
        within, gone = set(members), set(lost)
        points = self._known(rows, dict.fromkeys(within, round_), gone)
        settled = [p for p, why in enumerate(self._reasons(round_)) if why - {"diverged"}]
        found: dict[int, Stopped] = {}
        for point, (top, bar) in dominated(self._rule, points, settled).items():
            at_most = self._rule.sign(top.height)
            words = f"its score is at most {at_most:.6g}, and another point has at least "
            words += f"{self._rule.sign(bar.height):.6g}"
            if top.whole < bar.whole:
                words = "a seed of this point diverged, and another point lost none"
            for trial in self.trials_of(point):
                done = trial not in within and len(points[point][trial % self._seeds].values) > 0
                if not done and trial not in self.now:
                    at = round_ if trial in within else 0
                    found[trial] = Stopped(at, "cannot_win", words, at_most)
        return found

    def worse_half(self, rows: Rows, round_: int) -> dict[int, Stopped]:
        """Return trials of the points that a halving after this round stops: a heuristic."""
        before = {t for t, stopped in self.now.items() if stopped.round < round_}
        alive = [p for p in range(self._points) if any(t not in before for t in self.trials_of(p))]

        def height(point: int) -> float:
            each = [
                self._rule.worst if trial in before else rows[trial, round_]["metric"]
                for trial in self.trials_of(point)
            ]
            return self._rule.sign(sum(each) / len(each))

        heights = {p: height(p) for p in alive}
        # The sort is stable: the first of equals continue.
        order = sorted(alive, key=lambda p: -heights[p])
        kept = -(-len(order) // 2)
        words = f"heuristic: not in the better half, {kept} of {len(order)} points, after round "
        return {
            trial: Stopped(round_, "halving", f"{words}{round_}")
            for point in order[kept:]
            for trial in self.trials_of(point)
            if trial not in self.now
        }

    def unsettled(self, rows: Rows) -> list[int]:
        """Return trials that have to be trained to the end after all."""
        points, reasons = self._known(rows, {}, ()), self._reasons(self._spec.rounds + 1)
        stopped = [p for p, why in enumerate(reasons) if "cannot_win" in why]
        others = [p for p, why in enumerate(reasons) if "halving" in why]
        near = {p: neighbours(self._shape, p) for p in range(self._points)}
        return [
            t
            for p in unsettled(self._rule, points, stopped, others, near)
            for t in self.trials_of(p)
            if t in self.now and self.now[t].why == "cannot_win"
        ]

    def _reasons(self, round_: int) -> list[set[str]]:
        """Return the reasons why trials of each point were stopped before a round.

        Without later decisions, rounds that are repeated after a crash are judged as before.
        """
        earlier = {t: s.why for t, s in self.now.items() if s.round < round_}
        return [
            {earlier[t] for t in self.trials_of(p) if t in earlier} for p in range(self._points)
        ]

    def _known(
        self, rows: Rows, until: Mapping[int, int], lost: Collection[int]
    ) -> list[list[Known]]:
        each = [
            known(self._spec, t, rows, self.now.get(t), until.get(t))
            for t in range(self._points * self._seeds)
        ]
        each = [own._replace(lost=own.lost or t in lost) for t, own in enumerate(each)]
        return [[each[t] for t in self.trials_of(p)] for p in range(self._points)]


def _bound(spec: GridSpec, metric: Metric) -> float:
    if spec.stop.best_possible is not None:
        return spec.stop.best_possible
    if spec.stop.cannot_win and metric.name != "accuracy":
        raise InputError(
            f"stop.cannot_win needs the best possible value of {metric.name!r}: set "
            "stop.best_possible"
        )
    return 1.0
