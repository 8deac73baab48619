"""What ``fedzmg diff`` shows."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.results.diff import ASPECTS, Change, Difference
from fedzmg.report.terminal.tables import metric_text

MOST_ROWS = 40
_HEAD = 14
"""Characters of a line of a head: two such columns find room beside all others in 80."""


def screen(found: Difference, asked: Collection[str]) -> Iterator[RenderableType]:
    """The parts that were asked for, and a verdict."""
    changes = [change for change in found.changes if change.aspect in asked]
    if changes:
        yield from (_changes(found, changes), Text())
    if "curves" in asked:
        yield from (_curves(found), Text())
    if "scores" in asked and found.scores:
        yield from (_scores(found), Text())
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


def _heads(found: Difference) -> tuple[str, str]:
    first, second = (_broken(name) for name in short_names(found.left, found.right))
    return first, second


def _broken(name: str) -> str:
    r"""A name in lines that end where its parts do.

    >>> _broken("compare-digits-3f2a1b9c")
    'compare-\ndigits-\n3f2a1b9c'
    """
    lines = [""]
    for part in re.findall(r"[^-_./ ]*[-_./ ]*", name):
        if lines[-1] and len(lines[-1]) + len(part) > _HEAD:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _changes(found: Difference, changes: list[Change]) -> Table:
    table = _table("settings and circumstances", "what", "key", *_heads(found), "runs")
    total = len(found.curves)
    for change in changes:
        count = len(change.runs)
        runs = "the plan" if not count else "all" if count == total else f"{count} of {total}"
        table.add_row(change.aspect, change.key, _value(change.left), _value(change.right), runs)
    return table


def _value(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    # A hash needs no more than its beginning.
    return text[:12] if len(text) == 64 and " " not in text else text


def _curves(found: Difference) -> RenderableType:
    unequal = [pair for pair in found.curves if not pair.identical]
    equal = len(found.curves) - len(unequal)
    if not unequal:
        rounds = sum(pair.shared for pair in found.curves)
        return Text(f"curves: all {equal} bit-identical ({rounds} lines compared)")
    table = _table(
        f"curves: {equal} of {len(found.curves)} bit-identical",
        "run", "lines", "first difference", "there in", f"most in {found.metric}", "in losses",
    )  # fmt: skip
    for pair in unequal[:MOST_ROWS]:
        table.add_row(
            pair.name,
            str(pair.shared)
            if pair.rounds[0] == pair.rounds[1]
            else "{} and {}".format(*pair.rounds),
            "none as far as both go" if pair.first is None else f"round {pair.first}",
            ", ".join(pair.fields),
            _number(pair.largest, "metric"),
            _number(pair.largest, "loss", "train_loss"),
        )
    if len(unequal) > MOST_ROWS:
        table.add_row(f"and {len(unequal) - MOST_ROWS} more")
    return table


def _number(largest: Mapping[str, float], *names: str) -> str:
    known = [largest[name] for name in names if name in largest]
    return f"{max(known):.3g}" if known else "-"


def _scores(found: Difference) -> Table:
    table = _table(
        f"final {found.metric}, means over seeds (of a grid: its best point)",
        "algorithm", *_heads(found), "difference", "p", "d_z", "pairs",
    )  # fmt: skip
    for pair in found.scores:
        left, right = (_score(found, values) for values in (pair.left, pair.right))
        both = left is not None and right is not None
        test = pair.test
        table.add_row(
            pair.name,
            "-" if left is None else metric_text(left, found.metric),
            "-" if right is None else metric_text(right, found.metric),
            _signed((left or 0.0) - (right or 0.0), found.metric) if both else "-",
            "-" if test is None else f"{test.p:.3g}",
            "-" if test is None else f"{test.effect_size:+.2f}",
            "-" if test is None else str(test.n),
        )
    return table


def _score(found: Difference, values: Mapping[str, float]) -> float | None:
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return None
    if all(key.startswith("seed ") for key in values):
        return statistics.fmean(values.values())
    return max(finite) if found.higher_is_better else min(finite)


def _signed(value: float, metric: str) -> str:
    return ("+" if value >= 0 else "") + metric_text(value, metric)


def _table(title: str, *heads: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
