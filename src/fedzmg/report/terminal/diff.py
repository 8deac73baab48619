"""What ``fedzmg diff`` shows."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from fedzmg.report.terminal.stacked import Column, fits, fits_folded, folded, stacked
from fedzmg.results.diff import ASPECTS, Change, Curves, Difference
from fedzmg.results.formatting import NONE, signed_text, value_text

MOST_ROWS = 40
_SHORT_HEAD = 14
"""Characters of a line of a head: two such columns find room beside all others in 80."""
_LONG_HEAD = 20
"""The same where tables are one below the other anyway."""
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def screen(found: Difference, asked: Collection[str], width: int) -> Iterator[RenderableType]:
    """The parts that were asked for, and a verdict.

    Args:
        found: what differs.
        asked: aspects of it.
        width: of the terminal.
    """
    changes = [change for change in found.changes if change.aspect in asked]
    if changes:
        yield from _changes(found, changes, width)
    if "curves" in asked:
        yield from _curves(found, width)
    if "scores" in asked and found.scores:
        yield from _scores(found, width)
    if "runs" in asked:
        for place, names in ((found.left, found.only_left), (found.right, found.only_right)):
            if names:
                yield Text(f"only in {place}: {', '.join(names)}")
    yield Text(verdict(found, asked))


def verdict(found: Difference, asked: Collection[str]) -> str:
    """Whether they are equal, in a line."""
    unequal = [a for a in ASPECTS if a in asked and found.differs([a])]
    equal = [a for a in ASPECTS if a in asked and a not in unequal]
    if not unequal:
        return f"no difference in {', '.join(equal)}"
    rest = f"; no difference in {', '.join(equal)}" if equal else ""
    return f"they differ in {', '.join(unequal)}{rest}"


def short_names(left: str, right: str) -> tuple[str, str]:
    """Two places by what tells them apart: the ends of their paths, without what both share.

    >>> short_names("runs/2024/study", "runs/2025/study-b")
    ('study', 'study-b')
    >>> short_names("runs/one/fedzmg/seed-0", "runs/two/fedzmg/seed-0")
    ('one/.../seed-0', 'two/.../seed-0')
    """
    ends = [Path(os.path.abspath(place)).parts for place in (left, right)]
    depth = 1
    while ends[0] != ends[1] and ends[0][-depth:] == ends[1][-depth:]:
        depth += 1
    first, second = (
        Path(*(parts[-depth:] if depth < 3 else (parts[-depth], "...", parts[-1]))).as_posix()
        for parts in ends
    )
    return first, second


def _changes(found: Difference, changes: Sequence[Change], width: int) -> Iterator[RenderableType]:
    yield _title("settings and circumstances")
    names = [f"{change.aspect}: {change.key}" for change in changes]
    left, right = short_names(found.left, found.right)
    first = Column(left, [_value(change.left) for change in changes], words=True)
    second = Column(right, [_value(change.right) for change in changes], words=True)
    runs = [_count(change, len(found.curves)) for change in changes]
    what, columns = Column("what", names), [first, second, Column("runs", runs, words=True)]
    if not fits_folded(what, columns, width):
        runs = [f"({text.replace(' of ', '/')})" for text in runs]
        what = Column("what (runs)", [" ".join(pair) for pair in zip(names, runs, strict=True)])
        columns = [_one_below_the_other(first, second)]
    yield from stacked(what, columns, width)


def _one_below_the_other(first: Column, second: Column) -> Column:
    """Both in the room of one."""
    both = [f"{a}\n{b}" for a, b in zip(first.cells, second.cells, strict=True)]
    return first._replace(head=f"{first.head}\n{second.head}", cells=both)


def _count(change: Change, total: int) -> str:
    count = len(change.runs)
    return "the plan" if not count else "all" if count == total else f"{count} of {total}"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    # A hash needs no more than its beginning.
    return text[:12] if _HASH.fullmatch(text) else text


def _curves(found: Difference, width: int) -> Iterator[RenderableType]:
    unequal = [pair for pair in found.curves if not pair.identical]
    equal = len(found.curves) - len(unequal)
    if not unequal:
        rounds = sum(pair.shared for pair in found.curves)
        yield Text(f"curves: all {equal} bit-identical ({rounds} lines compared)\n")
        return
    yield _title(f"curves: {equal} of {len(found.curves)} bit-identical")
    shown = unequal[:MOST_ROWS]
    names = Column("run", [pair.name for pair in shown])
    columns = _curve_columns(shown, found.metric)
    whole = [_in_one_line(column) for column in columns]
    yield from stacked(names, whole if fits(names, whole, width) else columns, width)
    if len(unequal) > len(shown):
        yield Text(f"and {len(unequal) - len(shown)} more\n")


def _in_one_line(column: Column) -> Column:
    head, *cells = (text.replace("\n", " ") for text in (column.head, *column.cells))
    return column._replace(head=head, cells=cells)


def _curve_columns(pairs: Sequence[Curves], metric: str) -> list[Column]:
    """In two lines where that takes less room."""
    columns = {
        "lines": [
            str(pair.shared)
            if pair.rounds[0] == pair.rounds[1]
            else "{} and {}".format(*pair.rounds)
            for pair in pairs
        ],
        "first\ndifference": [
            "none as far\nas both go" if pair.first is None else f"round {pair.first}"
            for pair in pairs
        ],
        f"most in\n{metric}": [_number(pair.largest, "metric") for pair in pairs],
        "in\nlosses": [_number(pair.largest, "loss", "train_loss") for pair in pairs],
    }
    fields = Column("differs first in", [", ".join(pair.fields) for pair in pairs], words=True)
    return [*(Column(head, cells) for head, cells in columns.items()), fields]


def _number(largest: Mapping[str, float], *names: str) -> str:
    known = [largest[name] for name in names if name in largest]
    return f"{max(known):.3g}" if known else "-"


def _scores(found: Difference, width: int) -> Iterator[RenderableType]:
    yield _title(f"final {found.metric}, means over seeds (of a grid: its best point)")
    names = Column("algorithm", [pair.name for pair in found.scores])
    columns = _score_columns(found)
    for room in (width, _SHORT_HEAD, _LONG_HEAD):
        shown = [column._replace(head=folded(column.head, room)) for column in columns]
        if fits_folded(names, shown, width):
            break
    yield from stacked(names, shown, width)


def _score_columns(found: Difference) -> list[Column]:
    metric = found.metric
    lefts = [_score(found, pair.left) for pair in found.scores]
    rights = [_score(found, pair.right) for pair in found.scores]
    gaps = [
        None if left is None or right is None else left - right
        for left, right in zip(lefts, rights, strict=True)
    ]
    tests = [pair.test for pair in found.scores]
    first, second = short_names(found.left, found.right)
    return [
        Column(first, [value_text(score, metric) for score in lefts]),
        Column(second, [value_text(score, metric) for score in rights]),
        Column("difference", ["-" if gap is None else _signed(gap, metric) for gap in gaps]),
        Column("p", ["-" if test is None else f"{test.p:.3g}" for test in tests]),
        Column("d_z", [NONE if test is None else signed_text(test.effect_size) for test in tests]),
        Column("pairs", ["-" if test is None else str(test.n) for test in tests]),
    ]


def _score(found: Difference, values: Mapping[str, float]) -> float | None:
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return None
    if all(key.startswith("seed ") for key in values):
        return statistics.fmean(values.values())
    return max(finite) if found.higher_is_better else min(finite)


def _signed(value: float, metric: str) -> str:
    return value_text(value, metric, signed=True)


def _title(text: str) -> Text:
    return Text(f"{text}\n", style="bold")
