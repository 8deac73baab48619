"""Terminal output of ``fedzmg watch``: tables in a terminal, a line per piece of work elsewhere."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from rich.console import Console, RenderableType

from fedzmg.provenance import PYTHON
from fedzmg.report.tables.table import Cell, Table
from fedzmg.results.formatting import duration, value_text
from fedzmg.results.watch import State, Training, Work
from fedzmg.terminal.render import bold, render

MOST_ROWS = 30
"""Runs that are shown one by one; more of them are grouped by algorithm."""
FIRST: tuple[State, ...] = ("running", "interrupted", "diverged", "stopped", "done", "waiting")
"""Row priority when the terminal is too short."""


def screen(works: Iterable[Work], width: int) -> RenderableType:
    """Show everything."""
    return render(itertools.chain.from_iterable(map(_parts, works)), width)


def fitted(works: Iterable[Work], console: Console) -> RenderableType:
    """Show everything, what moves first: a terminal that is too short cuts off the end."""
    moving = [
        work._replace(trainings=tuple(sorted(work.trainings, key=lambda t: FIRST.index(t.state))))
        for work in sorted(works, key=lambda work: not work.alive)
    ]
    return screen(moving, console.width)


def _parts(work: Work) -> Iterator[Table | RenderableType]:
    """Make the facts of a piece of work and the table below them."""
    yield bold(f"{work.directory}: {work.kind} of {work.task}" if work.task else work.directory)
    yield from facts(work)
    yield ""
    each = work.kind != "grid" and len(work.trainings) <= MOST_ROWS
    groups: dict[str, list[Training]] = {}
    for one in work.trainings:
        groups.setdefault(one.name if each else one.group, []).append(one)
    if groups:
        yield _table(work, list(groups.values()), each)


def _table(work: Work, groups: Sequence[Sequence[Training]], each: bool) -> Table:
    """Make a row per training, or per algorithm with its best training."""
    rows, metric = [], work.metric
    for own in groups:
        first = own[0]
        best = first if each else work._replace(trainings=tuple(own)).best
        remark = first.why
        if not each:
            named = ", ".join(map(" ".join, best.options.items())) if best else ""
            remark = named or (best.point if best else "")
        rows.append([
            Cell(first.shown if each else first.label),
            Cell(first.state, None, first.state) if each else Cell(states(own)),
            Cell(f"{_rounds(own)} / {first.rounds}"), Cell(_metric(work, best)),
            Cell(remark, None, "words"),
        ])  # fmt: skip
    heads = ("run", "state", "round", metric, "why")
    if not each:
        point = "best point" if work.kind == "grid" else "best run"
        heads = ("algorithm", "state", "round", f"best {metric}", point)
    return Table("", "", heads, rows, words=2)


def facts(work: Work) -> list[str]:
    """Describe the best run, the speed, the time left and the owner of the lock."""
    found, best = [], work.best
    if best is not None:
        value = f"{work.metric} {_metric(work, best)}"
        found.append(f"best so far: {best.shown}, {value} after round {best.evaluated}")
    if work.owner is not None:
        found.append(f"held by {work.owner}{'' if work.alive else ', which is gone'}")
    return [*found, *(["complete"] if work.complete and not work.alive else _pace(work))]


def line(work: Work) -> str:
    """Describe a piece of work in one line."""
    if work.kind == "starting":
        return f"{work.directory}: {'starting' if work.alive else ''.join(_pace(work))}"
    current = [one for one in work.trainings if one.state == "running"] or work.trainings
    parts = [f"{work.directory}: {states(work.trainings)}"]
    parts += [f"round {_rounds(current)} of {current[0].rounds}"]
    if (best := work.best) is not None:
        old = best.evaluated is not None and best.evaluated < best.round
        after = f", after round {best.evaluated}" if old else ""
        parts.append(f"best {work.metric} {_metric(work, best)} ({best.shown}{after})")
    return ", ".join([*parts, *_pace(work)])


def states(trainings: Iterable[Training]) -> str:
    """Count trainings by state.

    >>> states([Training("a", "a", "done", 3, 3, True), Training("b", "b", "waiting", 0, 3, False)])
    '1 done, 1 waiting'
    """
    count = Counter(one.state for one in trainings)
    order = reversed(get_args(State))
    return ", ".join(f"{count[state]} {state}" for state in order if count[state])


def _rounds(trainings: Sequence[Training]) -> str:
    low, high = (extreme(one.round for one in trainings) for extreme in (min, max))
    return str(low) if low == high else f"{low} to {high}"


def _metric(work: Work, one: Training | None) -> str:
    return "" if one is None or one.metric is None else value_text(one.metric, work.metric)


def _pace(work: Work) -> list[str]:
    """Describe speed and time left of work in progress, or the way to continue it."""
    if work.complete:
        return []
    if not work.alive:
        remedy = f"run the same command again to continue: {work.command or ''}".removesuffix(": ")
        if work.command == PYTHON:
            call = "tune" if work.kind == "grid" else "compare"
            remedy = f"make the same call of fedzmg.{call} again to continue"
        return [f"nobody is at work: {remedy}"]
    running = sum(one.state == "running" for one in work.trainings)
    beside = f" of {running} side by side" if running > 1 else ""
    found = [] if work.rate is None else [f"{work.rate:.3g} rounds/s{beside}"]
    left = work.seconds_left
    return found if left is None else [*found, f"about {duration(left)} left"]
