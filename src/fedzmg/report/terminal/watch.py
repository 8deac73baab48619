"""What ``fedzmg watch`` shows: tables in a terminal, a line per piece of work elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.numbers import duration
from fedzmg.report.results.watch import State, Training, Work
from fedzmg.report.terminal.tables import metric_text

MOST_ROWS = 30
"""Trainings that are shown one by one; more of them are summed up by algorithm."""
STYLES = {"running": "green", "diverged": "red", "interrupted": "yellow", "done": "dim"}


def screen(works: Iterable[Work]) -> RenderableType:
    """All there is to see."""
    parts: list[RenderableType] = []
    for work in works:
        parts += [table(work), *(Text(line) for line in facts(work)), Text()]
    return Group(*parts)


def table(work: Work) -> Table:
    """A row per training, or per algorithm where there are too many."""
    each = work.kind != "grid" and len(work.trainings) <= MOST_ROWS
    found = Table(
        title=f"{work.place}: {work.kind} of {work.task}" if work.task else work.place,
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    found.add_column("run" if each else "algorithm", no_wrap=True)
    found.add_column("state")
    found.add_column("round", justify="right", no_wrap=True)
    found.add_column(work.metric if each else f"best {work.metric}", justify="right", no_wrap=True)
    found.add_column("", overflow="fold")
    if each:
        for one in work.trainings:
            state = Text(one.state, style=STYLES.get(one.state, ""))
            found.add_row(
                one.name, state, f"{one.round} / {one.rounds}", _metric(work, one), one.why
            )
        return found
    for group in dict.fromkeys(one.group for one in work.trainings):
        members = [one for one in work.trainings if one.group == group]
        best = work._replace(trainings=tuple(members)).best
        found.add_row(
            group,
            states(members),
            f"{_rounds(members)} / {members[0].rounds}",
            "" if best is None else _metric(work, best),
            "" if best is None else best.name.removeprefix(group).strip(" /"),
        )
    return found


def facts(work: Work) -> list[str]:
    """Who is at work, how fast, how long yet, and what is ahead."""
    found = []
    best = work.best
    if best is not None:
        found.append(
            f"best so far: {best.name}, {work.metric} {_metric(work, best)} after round "
            f"{best.evaluated}"
        )
    if work.alive and not work.complete:
        found += [text for text in (_speed(work), _left(work)) if text]
    if work.owner is not None:
        found.append(f"held by {work.owner}{'' if work.alive else ', which is gone'}")
    if work.complete and not work.alive:
        found.append("complete")
    elif not work.alive:
        found.append(_left_alone(work))
    return found


def line(work: Work) -> str:
    """One line about one piece of work."""
    if work.kind == "starting":
        return f"{work.place}: {'starting' if work.alive else _left_alone(work)}"
    at = [one for one in work.trainings if one.state == "running"] or work.trainings
    best = work.best
    parts = [
        f"{work.place}: {states(work.trainings)}",
        f"round {_rounds(at)} of {at[0].rounds}",
        "" if best is None else f"best {work.metric} {_metric(work, best)} ({best.name})",
    ]
    if work.alive and not work.complete:
        parts += [_speed(work), _left(work)]
    elif not work.complete:
        parts.append(_left_alone(work))
    return ", ".join(filter(None, parts))


def states(trainings: Iterable[Training]) -> str:
    """How many are in which state.

    >>> states([Training("a", "a", "done", 3, 3, True), Training("b", "b", "waiting", 0, 3, False)])
    '1 done, 1 waiting'
    """
    count = Counter(one.state for one in trainings)
    order = reversed(get_args(State))
    return ", ".join(f"{count[state]} {state}" for state in order if count[state])


def _rounds(trainings: Sequence[Training]) -> str:
    rounds = [one.round for one in trainings]
    low, high = min(rounds), max(rounds)
    return str(low) if low == high else f"{low} to {high}"


def _metric(work: Work, one: Training) -> str:
    return "" if one.metric is None else metric_text(one.metric, work.metric)


def _speed(work: Work) -> str:
    if work.rate is None:
        return ""
    running = sum(one.state == "running" for one in work.trainings)
    beside = f" of {running} side by side" if running > 1 else ""
    return f"{work.rate:.3g} rounds/s{beside}"


def _left_alone(work: Work) -> str:
    again = f": {work.command}" if work.command else ""
    return f"nobody is at work: run the same command again to go on{again}"


def _left(work: Work) -> str:
    left = work.seconds_left
    return "" if left is None else f"about {duration(left)} left"


__all__ = ["facts", "line", "screen", "states", "table"]
