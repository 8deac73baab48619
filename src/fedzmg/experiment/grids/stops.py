"""Which trials of a grid are trained no further, and the file that says so.

``stopped.jsonl`` has a line per decision: trial, round, reason. A line is never taken back but by
another one, with ``revoked``, when a point that was thought unable to win might win after all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.evaluation import Metric
from fedzmg.experiment.grids.bounds import Known, Rule, dominated, unsettled
from fedzmg.experiment.grids.log import Log, Rows
from fedzmg.experiment.grids.score import known, neighbours
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.stopping import Stopped


class Stops:
    """The decisions about one algorithm's trials.

    Raises:
        InputError: if the grid relies on a bound that its metric does not have.
    """

    def __init__(self, spec: GridSpec, name: str, metric: Metric, path: Path) -> None:
        self._spec, self._log = spec, Log(path)
        self._rule = Rule(spec.last, _bound(spec, metric), metric.higher_is_better)
        self._shape = [len(values) for values in spec.axes_of(name).values()]
        self._seeds, self._points = len(spec.seeds), len(spec.points(name))
        self.now: dict[int, Stopped] = {}
        """Decisions that hold, by trial."""
        self.revoked: set[int] = set()
        """Trials that were stopped and are trained to the end after all."""
        for line in self._log.lines():
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
        """Write decisions down; ``facts`` says what is to be known of every trial."""
        new = {trial: stopped for trial, stopped in found.items() if trial not in self.now}
        if new:
            self._log.append({"trial": t, **facts[t], **s.line()} for t, s in new.items())
        for trial, stopped in new.items():
            self._take(trial, stopped)

    def trials_of(self, point: int) -> range:
        """The trials of a point, one per seed."""
        return range(point * self._seeds, (point + 1) * self._seeds)

    def dominated(
        self, rows: Rows, members: Iterable[int], round_: int, lost: Iterable[int]
    ) -> dict[int, Stopped]:
        """Trials of points that cannot win any more, those that never began included.

        Args:
            rows: the log.
            members: trials of the pack that is at work.
            round_: where it is; what a log has of later rounds is about to be repeated.
            lost: trials that are known to have diverged although no line says so yet.
        """
        within, gone = set(members), set(lost)
        points = self._known(rows, dict.fromkeys(within, round_), gone)
        stopped_trials = [p for p, why in enumerate(self._reasons(round_)) if why - {"diverged"}]
        found: dict[int, Stopped] = {}
        for point, (top, bar) in dominated(self._rule, points, stopped_trials).items():
            at_most = self._rule.sign(top.height)
            words = f"its score can no longer pass {at_most:.6g}, and another has "
            words += f"{self._rule.sign(bar.height):.6g} for certain"
            if top.whole < bar.whole:
                words = "a seed of this point diverged, and another point lost none"
            for trial in self.trials_of(point):
                done = trial not in within and len(points[point][trial % self._seeds].values) > 0
                if not done and trial not in self.now:
                    at = round_ if trial in within else 0
                    found[trial] = Stopped(at, "cannot_win", words, at_most)
        return found

    def worse_half(self, rows: Rows, round_: int) -> dict[int, Stopped]:
        """Trials of the points that a halving after this round ends: a heuristic."""
        before = {t for t, stopped in self.now.items() if stopped.round < round_}
        alive = [p for p in range(self._points) if any(t not in before for t in self.trials_of(p))]

        def height(point: int) -> float:
            each = [
                self._rule.worst if trial in before else rows[trial, round_]["metric"]
                for trial in self.trials_of(point)
            ]
            return self._rule.sign(sum(each) / len(each))

        heights = {p: height(p) for p in alive}
        # The sort is stable: of equals the first go on.
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
        """Trials that have to be trained to the end after all."""
        points, reasons = self._known(rows, {}, ()), self._reasons(self._spec.rounds + 1)
        stopped = [p for p, why in enumerate(reasons) if "cannot_win" in why]
        others = [p for p, why in enumerate(reasons) if "halving" in why]
        near = {p: neighbours(self._shape, p) for p in range(self._points)}
        again = unsettled(self._rule, points, stopped, others, near)
        return [
            t
            for p in again
            for t in self.trials_of(p)
            if t in self.now and self.now[t].why == "cannot_win"
        ]

    def _reasons(self, round_: int) -> list[set[str]]:
        """Why trials of each point were stopped before a round.

        Later decisions are left out, so that rounds which a crash made the search repeat are judged
        as they were.
        """
        return [
            {self.now[t].why for t in self.trials_of(p) if t in self.now
             and self.now[t].round < round_}
            for p in range(self._points)
        ]  # fmt: skip

    def revoke(self, trials: Iterable[int]) -> None:
        """Take decisions back; the trials start again, and nothing stops them any more."""
        chosen = list(trials)
        if not chosen:
            return
        self._log.append({"trial": t, **self.now[t].line(), "revoked": True} for t in chosen)
        for trial in chosen:
            self._take(trial, self.now[trial], revoked=True)

    def _known(
        self, rows: Rows, until: Mapping[int, int], lost: Iterable[int]
    ) -> list[list[Known]]:
        gone = set(lost)
        found = []
        for point in range(self._points):
            seeds = []
            for t in self.trials_of(point):
                own = known(self._spec, t, rows, self.now.get(t), until.get(t))
                seeds.append(own._replace(lost=own.lost or t in gone))
            found.append(seeds)
        return found


def _bound(spec: GridSpec, metric: Metric) -> float:
    if spec.stop.best_possible is not None:
        return spec.stop.best_possible
    if spec.stop.cannot_win and metric.name != "accuracy":
        raise InputError(
            f"stop.cannot_win needs the best value that {metric.name!r} can have: say it as "
            "stop.best_possible"
        )
    return 1.0
