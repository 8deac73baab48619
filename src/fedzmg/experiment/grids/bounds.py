"""Which points of a grid cannot win any more: intervals that hold whatever is still to come.

A score is the mean over seeds of the mean of the last evaluations, and a seed that diverged counts
as the worst value. What is known of the evaluations bounds it from both sides. Sums are exact
before they are rounded, and rounding keeps order, so the bounds hold for the very numbers that the
scores will be.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedzmg.evaluation import worst


class Known(NamedTuple):
    """What is known of one trial."""

    values: list[float]
    """Evaluations that count, as far as there are any."""
    lost: bool = False
    """Whether it has diverged."""


class Merit(NamedTuple):
    """What points are compared by: none that lost a seed is chosen before one that did not."""

    whole: bool
    height: float
    """The score, its sign turned if less is better."""


class Rule(NamedTuple):
    """How scores are made."""

    last: int
    """Evaluations that count."""
    best: float
    """The best value there is, or that the user says there is."""
    higher: bool = True

    @property
    def worst(self) -> float:
        """The score of a trial that diverged, and the least that an evaluation may come to."""
        return worst(self.higher)

    def sign(self, value: float) -> float:
        """Heights grow as points get better."""
        return value if self.higher else -value

    def score(self, seeds: Sequence[Known], rest: float) -> float:
        """The score if every evaluation to come were ``rest``."""
        each = []
        for values, lost in seeds:
            to_come = [rest] * (self.last - len(values))
            each.append(self.worst if lost else statistics.fmean([*values, *to_come]))
        return statistics.fmean(each)

    def at_most(self, seeds: Sequence[Known]) -> Merit:
        """No point with these evaluations can end above this."""
        return Merit(not any(s.lost for s in seeds), self.sign(self.score(seeds, self.best)))

    def at_least(self, seeds: Sequence[Known]) -> Merit:
        """Nor below this, unless a seed diverges that has not."""
        return Merit(not any(s.lost for s in seeds), self.sign(self.score(seeds, self.worst)))

    def broken(self, points: Iterable[Sequence[Known]]) -> bool:
        """Whether an evaluation is better than the best there is said to be."""
        best = self.sign(self.best)
        return any(
            self.sign(value) > best for seeds in points for known in seeds for value in known.values
        )


def dominated(
    rule: Rule, points: Sequence[Sequence[Known]], stopped: Collection[int]
) -> dict[int, tuple[Merit, Merit]]:
    """Points that cannot win any more, with what each could come to and what beats it.

    Args:
        rule: how scores are made.
        points: what is known of the seeds of every point.
        stopped: points that are trained no further, which therefore beat nobody.
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
    """Points that were stopped because they could not win, and whose score is needed after all.

    Args:
        rule: how scores are made.
        points: what is known of the seeds of every point, now that all training is done.
        stopped: points that were stopped because they could not win.
        others: points that were stopped for other reasons, and have no score.
        near: neighbours by point; they decide between equals.
    """
    done = [i for i in range(len(points)) if i not in stopped and i not in others]
    merits = {i: rule.at_least(points[i]) for i in done}
    if not merits or rule.broken(points):
        return sorted(stopped)
    best = max(merits.values())
    again = {i for i in stopped if rule.at_most(points[i]) >= best}
    equals = [i for i in done if merits[i] == best]
    if len(equals) > 1:
        again |= {n for i in equals for n in near[i] if n in stopped}
    return sorted(again)
