"""Curves of runs as scores see them: the evaluations of :func:`.scores.scheduled`, no others.

Rounds count from 1. Evaluations go by the index of their round, which counts from 0: index ``r`` is
the state after round ``r + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedzmg.results import scores
from fedzmg.results.scores import FinalRule
from fedzmg.simulation import History


class Curve(NamedTuple):
    """The evaluations of a run that count."""

    indices: list[int]
    metrics: list[float]


def stopped(history: History) -> int | None:
    """The last round of a run that was trained no further before its end."""
    last = history.records[-1].round
    return last if last < history.task.protocol.rounds else None


def whole(histories: Sequence[History]) -> History:
    """The first run that went on to its end, else the first of the longest: what a run costs."""
    return max(histories, key=lambda h: h.records[-1].round)


def curve(history: History) -> Curve:
    """The evaluations of a run that count.

    One that was stopped is filled up with the worst value, which is what a run that diverged would
    have been recorded with.
    """
    protocol = history.task.protocol
    seen = dict(zip(history.rounds, history.metrics, strict=True))
    found = Curve([], [])
    for index in scores.scheduled(protocol.rounds, protocol.eval_every):
        if index + 1 in seen or stopped(history) is not None:
            found.indices.append(index)
            found.metrics.append(seen.get(index + 1, history.task.metric.worst))
    return found


def final(history: History, rule: FinalRule = "full") -> float:
    """Final metric of a run: the mean over the last tenth of its rounds.

    The worst there is if the run diverged. Of 1000 rounds evaluated every five, these are the
    twenty evaluations with the indices 900 to 995; ``author`` leaves the first of them out.
    """
    if history.diverged is not None:
        return history.task.metric.worst
    indices, metrics = curve(history)
    return scores.final_score(indices, metrics, total=history.records[-1].round, rule=rule)
