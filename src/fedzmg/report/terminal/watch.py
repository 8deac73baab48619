"""What ``fedzmg watch`` shows: tables in a terminal, a line per piece of work elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, get_args

from rich.console import Console, Group, RenderableType
from rich.text import Text

from fedzmg.provenance import PYTHON
from fedzmg.report.terminal.stacked import Column, fits, said_below, stacked
from fedzmg.results.formatting import NONE, duration, value_text
from fedzmg.results.watch import State, Training, Work

MOST_ROWS = 30
"""Trainings that are shown one by one; more of them are summed up by algorithm."""
STYLES = {"running": "green", "diverged": "red", "interrupted": "yellow", "done": "dim"}
FIRST: tuple[State, ...] = ("running", "interrupted", "diverged", "stopped", "done", "waiting")
"""Whose rows stay longest where a window has no room for all."""


class _Rows(NamedTuple):
    """What a table shows."""

    names: Column
    columns: list[Column]
    below: list[str]
    """Words that find no room in it."""


def screen(works: Iterable[Work], width: int) -> RenderableType:
    """All there is to see.

    Args:
        works: each with a table of its own.
        width: of the terminal; what finds no room beside is below.
    """
    return Group(*(part for work in works for part in _whole(work, width)))


def fitted(works: Sequence[Work], console: Console) -> RenderableType:
    """As much as a window has lines for, with one left for what comes after it.

    Rows of a table are summed up first, those at work last; then works that nobody is at work on
    have no table, and at last none has.

    Args:
        works: each with a table of its own, if there is room.
        console: the window.
    """
    height = max(console.height - 1, 1)
    for with_table in ([True] * len(works), [work.alive for work in works]):
        screens = partial(_screen, list(zip(works, with_table, strict=True)), console.width)
        sizes = [max(len(w.trainings), 1) for w, yes in zip(works, with_table, strict=True) if yes]
        most = bisect_right(
            range(1, max(sizes, default=0) + 1),
            height,
            key=lambda rows: len(console.render_lines(screens(rows))),
        )
        if most:
            return screens(most)
    return Group(*_lines(works, height))


def _screen(works: Iterable[tuple[Work, bool]], width: int, most: int) -> RenderableType:
    """Tables of at most so many rows, and a line for each work that shall have none."""
    parts: list[RenderableType] = []
    for work, with_table in works:
        parts += _whole(work, width, most) if with_table else [_one_line(line(work))]
    return Group(*parts)


def _whole(work: Work, width: int, most: int | None = None) -> list[RenderableType]:
    return [*table(work, width, most), *(Text(fact) for fact in facts(work)), Text()]


def _lines(works: Sequence[Work], height: int) -> Iterator[Text]:
    """A line for each work, those at work first, and one about all that find no room."""
    order = sorted(works, key=lambda work: not work.alive)
    shown = order if len(order) <= height else order[: height - 1]
    yield from (_one_line(line(work)) for work in shown)
    hidden = order[len(shown) :]
    if hidden:
        yield _one_line(_more(len(hidden), [one for work in hidden for one in work.trainings]))


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _more(count: int, trainings: Sequence[Training]) -> str:
    """Words on what is not shown.

    >>> _more(2, [Training("a", "a", "done", 3, 3, True), Training("b", "b", "done", 3, 3, True)])
    'and 2 more: 2 done'
    """
    return f"and {count} more{': ' * bool(trainings)}{states(trainings)}"


def table(work: Work, width: int, most: int | None = None) -> Iterator[RenderableType]:
    """A row per training, or per algorithm where there are too many.

    Args:
        work: whose trainings.
        width: of the terminal.
        most: rows to show; a line sums up the others.
    """
    title = f"{work.place}: {work.kind} of {work.task}" if work.task else work.place
    yield Text(f"{title}\n", style="bold")
    if work.trainings:
        each = work.kind != "grid" and len(work.trainings) <= MOST_ROWS
        groups = [[one] for one in work.trainings] if each else _groups(work.trainings)
        shown = _foremost(groups, most)
        kept = work._replace(trainings=tuple(one for i in shown for one in groups[i]))
        rows = _one_by_one(kept, width) if each else _by_algorithm(kept, width)
        yield from stacked(rows.names, rows.columns, width)
        yield from map(Text, rows.below)
        hidden = [one for i, group in enumerate(groups) if i not in shown for one in group]
        if hidden:
            yield Text(_more(len(groups) - len(shown), hidden))


def _foremost(groups: Sequence[Sequence[Training]], most: int | None) -> list[int]:
    """Places of the rows to show, in the order of the table."""
    order = sorted(
        range(len(groups)), key=lambda i: min(FIRST.index(one.state) for one in groups[i])
    )
    return sorted(order[:most])


def _groups(trainings: Iterable[Training]) -> list[list[Training]]:
    """By algorithm."""
    found: dict[str, list[Training]] = {}
    for one in trainings:
        found.setdefault(one.group, []).append(one)
    return list(found.values())


def _one_by_one(work: Work, width: int) -> _Rows:
    shown = work.trainings
    names = Column("run", [one.shown for one in shown])
    state = Column("state", [one.state for one in shown], words=True, styles=STYLES)
    metric = Column(work.metric, [_metric(work, one) for one in shown])
    at = [str(one.round) for one in shown]
    columns = [state, _beside_all(work, at), metric]
    if not fits(names, columns, width):
        columns = [state, _below_all(work, at), metric]
    why = Column("why", [one.why for one in shown], words=True)
    if any(why.cells) and fits(names, [*columns, why], width):
        return _Rows(names, [*columns, why], [])
    return _Rows(names, columns, said_below(names, why))


def _by_algorithm(work: Work, width: int) -> _Rows:
    members = _groups(work.trainings)
    bests = [work._replace(trainings=tuple(own)).best for own in members]
    at = [_rounds(own) for own in members]
    state = Column("state", [states(own) for own in members], words=True)
    names = Column("algorithm", [own[0].label for own in members])
    best = Column(
        f"best {work.metric}", ["" if one is None else _metric(work, one) for one in bests]
    )
    point = Column(
        "best point" if work.kind == "grid" else "best run",
        ["" if one is None else one.point for one in bests],
        words=True,
    )
    whole = [state, _beside_all(work, at), best, point]
    if fits(names, whole, width):
        return _Rows(names, whole, [])
    columns = [
        state._replace(cells=[cell.replace(", ", ",\n") for cell in state.cells]),
        _below_all(work, at),
        best._replace(head=f"best\n{work.metric}"),
    ]
    if work.kind != "grid":
        return _Rows(names, [*columns, point], [])
    axes, words = _axes(work.trainings)
    points = ["" if one is None else _numbers(one, axes) for one in bests]
    return _Rows(names, [*columns, point._replace(cells=points)], [f"best point: {words}"])


def _beside_all(work: Work, at: Sequence[str]) -> Column:
    """Rounds done, each with how many there are in all."""
    return Column("round", [f"{done} / {work.trainings[0].rounds}" for done in at])


def _below_all(work: Work, at: Sequence[str]) -> Column:
    """The same in less room."""
    return Column(f"round\nof {work.trainings[0].rounds}", at)


def _axes(trials: Sequence[Training]) -> tuple[list[str], str]:
    """Options that tell trials of a grid apart, and words on them and on those that do not."""
    points = [one.options for one in trials]
    keys = dict.fromkeys(key for point in points for key in point)
    axes = [key for key in keys if len({point.get(key) for point in points}) > 1]
    same = [f"{key}={points[0][key]}" for key in keys if key not in axes]
    return axes, "; ".join(
        filter(None, [", ".join(axes), f"{', '.join(same)} in all" * bool(same)])
    )


def _numbers(one: Training, axes: Sequence[str]) -> str:
    return ", ".join(one.options.get(axis, NONE) for axis in axes)


def facts(work: Work) -> list[str]:
    """Who is at work, how fast, how long yet, and what is ahead."""
    found = []
    best = work.best
    if best is not None:
        found.append(
            f"best so far: {best.shown}, {work.metric} {_metric(work, best)} after round "
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
        "" if best is None else f"best {work.metric} {_metric(work, best)} ({_whose(best)})",
    ]
    if work.alive and not work.complete:
        parts += [_speed(work), _left(work)]
    elif not work.complete:
        parts.append(_left_alone(work))
    return ", ".join(filter(None, parts))


def _whose(best: Training) -> str:
    """A training, and the round of its metric if that is not the last one.

    >>> _whose(Training("a", "a", "running", 33, 40, False, evaluated=1, label="a"))
    'a, after round 1'
    """
    old = best.evaluated is not None and best.evaluated < best.round
    return f"{best.shown}, after round {best.evaluated}" if old else best.shown


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
    return "" if one.metric is None else value_text(one.metric, work.metric)


def _speed(work: Work) -> str:
    if work.rate is None:
        return ""
    running = sum(one.state == "running" for one in work.trainings)
    beside = f" of {running} side by side" if running > 1 else ""
    return f"{work.rate:.3g} rounds/s{beside}"


def _left_alone(work: Work) -> str:
    if work.command == PYTHON:
        call = {"run": "compare", "study": "compare", "grid": "tune"}.get(work.kind)
        which = f" of fedzmg.{call}" if call else ""
        return f"nobody is at work: make the same call{which} again to go on"
    again = f": {work.command}" if work.command else ""
    return f"nobody is at work: run the same command again to go on{again}"


def _left(work: Work) -> str:
    left = work.seconds_left
    return "" if left is None else f"about {duration(left)} left"
