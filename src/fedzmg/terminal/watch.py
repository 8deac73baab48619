"""Terminal output of ``fedzmg watch``: tables in a terminal, a line per piece of work elsewhere."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fedzmg.provenance import PYTHON
from fedzmg.report.tables.table import Cell, Table
from fedzmg.results.formatting import duration, plain, value_text
from fedzmg.results.watch import State, Training, Work
from fedzmg.terminal.render import render

MOST_ROWS = 30
"""Runs that are shown one by one; more of them are grouped by algorithm."""
FIRST: tuple[State, ...] = ("running", "interrupted", "diverged", "stopped", "done", "waiting")
"""Row priority when the terminal is too short."""


def screen(works: Iterable[Work], width: int) -> RenderableType:
    """Show everything."""
    return render(itertools.chain.from_iterable(_parts(work) for work in works), width)


def fitted(works: Sequence[Work], console: Console) -> RenderableType:
    """Show as much as the terminal has lines for: fewer rows, then lines instead of tables."""

    def view(only_alive: bool, most: int) -> RenderableType:
        parts = (
            [_one_line(line(work))] if only_alive and not work.alive else _parts(work, most)
            for work in works
        )
        return render(itertools.chain.from_iterable(parts), console.width)

    def size(only_alive: bool, most: int) -> int:
        return len(console.render_lines(view(only_alive, most)))

    height = max(console.height - 1, 1)
    counts = range(1, max((len(work.trainings) for work in works), default=0) + 2)
    for alone in (False, True):
        most = bisect_right(counts, height, key=partial(size, alone))
        if most:
            return view(alone, most)
    lines = [line(work) for work in sorted(works, key=lambda work: not work.alive)]
    if len(lines) > height:
        lines[height - 1 :] = [f"and {len(lines) - height + 1} more"]
    return Group(*map(_one_line, lines))


def _one_line(text: str) -> Text:
    return Text(plain(text), no_wrap=True, overflow="ellipsis")


def _parts(work: Work, most: int | None = None) -> Iterator[Table | str]:
    """Make the table of a piece of work, at most so many rows, and the facts below it."""
    title = f"{work.directory}: {work.kind} of {work.task}" if work.task else work.directory
    each = work.kind != "grid" and len(work.trainings) <= MOST_ROWS
    groups: dict[str, list[Training]] = {}
    for one in work.trainings:
        groups.setdefault(one.name if each else one.group, []).append(one)
    order = sorted(groups, key=lambda name: min(FIRST.index(one.state) for one in groups[name]))
    hidden = order[most:] if most else []
    shown = [own for name, own in groups.items() if name not in hidden]
    if not shown:
        yield f"{title}\n"
    elif each:
        yield _by_run(title, work, [own[0] for own in shown])
    else:
        yield _by_algorithm(title, work, shown)
    if hidden:
        others = states(one for name in hidden for one in groups[name])
        yield f"and {len(hidden)} more: {others}"
    yield from facts(work)
    yield ""


def _by_run(title: str, work: Work, shown: Sequence[Training]) -> Table:
    reasons = any(one.why for one in shown)
    rows = [
        [
            Cell(one.shown),
            Cell(one.state, None, one.state),
            Cell(f"{one.round} / {one.rounds}"),
            Cell(_metric(work, one)),
            *[Cell(one.why, None, "words")] * reasons,
        ]
        for one in shown
    ]
    return Table("", title, ("run", "state", "round", work.metric, *["why"] * reasons), rows,
                 words=2)  # fmt: skip


def _by_algorithm(title: str, work: Work, groups: Sequence[Sequence[Training]]) -> Table:
    rows = []
    for own in groups:
        best = work._replace(trainings=tuple(own)).best
        point = ""
        if best is not None:
            point = ", ".join(map(" ".join, best.options.items())) or best.point
        rows.append([
            Cell(own[0].label), Cell(states(own)), Cell(f"{_rounds(own)} / {own[0].rounds}"),
            Cell("" if best is None else _metric(work, best)), Cell(point, None, "words"),
        ])  # fmt: skip
    point = "best point" if work.kind == "grid" else "best run"
    heads = ("algorithm", "state", "round", f"best {work.metric}", point)
    return Table("", title, heads, rows, words=2)


def facts(work: Work) -> list[str]:
    """Describe the best run, the speed, the time left and the owner of the lock."""
    found = []
    best = work.best
    if best is not None:
        value = f"{work.metric} {_metric(work, best)}"
        found.append(f"best so far: {best.shown}, {value} after round {best.evaluated}")
    if work.alive and not work.complete:
        found += [text for text in (_speed(work), _left(work)) if text]
    if work.owner is not None:
        found.append(f"held by {work.owner}{'' if work.alive else ', which is gone'}")
    if not work.alive:
        found.append("complete" if work.complete else _abandoned(work))
    return found


def line(work: Work) -> str:
    """Describe a piece of work in one line."""
    if work.kind == "starting":
        return f"{work.directory}: {'starting' if work.alive else _abandoned(work)}"
    current = [one for one in work.trainings if one.state == "running"] or work.trainings
    best = work.best
    parts = [
        f"{work.directory}: {states(work.trainings)}",
        f"round {_rounds(current)} of {current[0].rounds}",
    ]
    if best is not None:
        old = best.evaluated is not None and best.evaluated < best.round
        after = f", after round {best.evaluated}" if old else ""
        parts.append(f"best {work.metric} {_metric(work, best)} ({best.shown}{after})")
    if work.alive and not work.complete:
        parts += [_speed(work), _left(work)]
    elif not work.complete:
        parts.append(_abandoned(work))
    return ", ".join(filter(None, parts))


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


def _metric(work: Work, one: Training) -> str:
    return "" if one.metric is None else value_text(one.metric, work.metric)


def _speed(work: Work) -> str:
    running = sum(one.state == "running" for one in work.trainings)
    beside = f" of {running} side by side" if running > 1 else ""
    return "" if work.rate is None else f"{work.rate:.3g} rounds/s{beside}"


def _left(work: Work) -> str:
    return "" if work.seconds_left is None else f"about {duration(work.seconds_left)} left"


def _abandoned(work: Work) -> str:
    if work.command == PYTHON:
        call = {"run": "compare", "study": "compare", "grid": "tune"}.get(work.kind)
        of = f" of fedzmg.{call}" if call else ""
        return f"nobody is at work: make the same call{of} again to continue"
    command = f": {work.command}" if work.command else ""
    return f"nobody is at work: run the same command again to continue{command}"
