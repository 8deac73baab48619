"""Early stopping: decisions, and the proof that a point of a grid cannot win.

Nothing is stopped unless a plan asks for it. A stopped trial keeps its model, leaves its pack and
has a record with the round and the reason.

A score is the mean over seeds of the mean of the last evaluations; a diverged seed counts as the
worst value. The evaluations so far bound it on both sides. Sums are exact before they are rounded
and rounding is monotonic, so the bounds hold for the very numbers that the scores will be.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from fedzmg.errors import InputError
from fedzmg.evaluation import worst
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import RESTORE, read_json, write_json

Why: TypeAlias = Literal["diverged", "cannot_win", "halving"]
NAME = "stopped.json"
FORMAT = 1


class Stopped(NamedTuple):
    """The decision to stop a trial."""

    round: int
    """The last round that it trained; 0 if it never began."""
    why: Why
    words: str
    """The reason in words."""
    at_most: float | None = None
    """Upper bound of the score that the trial or its point could have reached."""

    @property
    def heuristic(self) -> bool:
        """True if the trial might have won."""
        return self.why == "halving"

    def line(self) -> dict[str, Any]:
        """Return the decision ready for JSON."""
        return {**self._asdict(), "heuristic": self.heuristic}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Stopped:
        """Parse a decision; a wrong value raises ``KeyError``, ``TypeError``, ``ValueError``."""
        if line["why"] not in get_args(Why):
            raise ValueError(f"unknown reason {line['why']!r}")
        bound = line.get("at_most")
        bound = None if bound is None else float(bound)
        return cls(int(line["round"]), line["why"], str(line["words"]), bound)


class Verdict(NamedTuple):
    """Decisions after a round."""

    end: bool = False
    """End the whole command: the time limit is reached."""
    stopped: Mapping[int, Stopped] = {}
    """Trials to stop, by their position in the simulation."""


Ask: TypeAlias = Callable[[RoundReport], Verdict]
"""Stopping rule, called after every round."""


def newly_diverged(report: RoundReport) -> dict[int, Stopped]:
    """Return trials that diverged and would continue to train."""
    if report.round == report.simulation.rounds:
        return {}
    return {
        i: Stopped(report.round, "diverged", f"diverged in round {report.round}")
        for i, record in enumerate(report.records)
        if record.diverged and i not in report.simulation.stopped_trials
    }


def write(directory: Path, stopped: Stopped) -> None:
    """Write a decision into a run directory."""
    write_json(directory / NAME, {"format": FORMAT, **stopped.line()})


def read(directory: Path) -> Stopped | None:
    """Read the decision in a run directory, if there is one."""
    path = directory / NAME
    if not path.exists():
        return None
    values = read_json(path, wanted=FORMAT)
    try:
        return Stopped.of(values)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None


class Known(NamedTuple):
    """Evaluations of one trial so far."""

    values: list[float]
    """Evaluations that count."""
    lost: bool = False
    """True if the trial has diverged."""


class Merit(NamedTuple):
    """Sort key of points: a point that lost a seed ranks below every other."""

    whole: bool
    height: float
    """The score, negated if lower is better."""


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

    def score(self, seeds: Sequence[Known], rest: float) -> float:
        """Return the score if every evaluation to come were ``rest``."""
        each = []
        for values, lost in seeds:
            to_come = [rest] * (self.last - len(values))
            each.append(self.worst if lost else statistics.fmean([*values, *to_come]))
        return statistics.fmean(each)

    def at_most(self, seeds: Sequence[Known], rest: float | None = None) -> Merit:
        """Return the upper bound of a point's merit, if evaluations to come are ``rest``."""
        score = self.score(seeds, self.best if rest is None else rest)
        return Merit(not any(s.lost for s in seeds), self.sign(score))

    def at_least(self, seeds: Sequence[Known]) -> Merit:
        """Return the lower bound of a point's merit, unless another seed diverges."""
        return self.at_most(seeds, self.worst)

    def broken(self, points: Iterable[Sequence[Known]]) -> bool:
        """Return whether an evaluation is better than the best possible value."""
        best = self.sign(self.best)
        return any(
            self.sign(value) > best for seeds in points for known in seeds for value in known.values
        )


def dominated(
    rule: Rule, points: Sequence[Sequence[Known]], stopped: Collection[int]
) -> dict[int, tuple[Merit, Merit]]:
    """Return points that cannot win any more, with their upper bound and the bound they miss.

    ``points`` has the evaluations of every point's seeds; ``stopped`` points beat no other.
    """
    rivals = [rule.at_least(seeds) for i, seeds in enumerate(points) if i not in stopped]
    if not rivals or rule.broken(points):
        return {}
    bar = max(rivals)
    tops = {i: rule.at_most(seeds) for i, seeds in enumerate(points) if i not in stopped}
    return {i: (top, bar) for i, top in tops.items() if top < bar}


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
    merits = {i: rule.at_least(points[i]) for i in done}
    if not merits or rule.broken(points):
        return sorted(stopped)
    best = max(merits.values())
    found = {i for i in stopped if rule.at_most(points[i]) >= best}
    equals = [i for i in done if merits[i] == best]
    if len(equals) > 1:
        found |= {n for i in equals for n in near[i] if n in stopped}
    return sorted(found)
