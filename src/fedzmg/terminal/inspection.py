"""Terminal output of ``fedzmg diff`` and ``fedzmg verify``."""

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

from fedzmg.report.tables.table import Cell, Table
from fedzmg.results.diff import ASPECTS, Change, Difference
from fedzmg.results.formatting import NONE, signed_text, value_text
from fedzmg.terminal.render import render

MOST_ROWS = 40
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def diff(found: Difference, asked: Collection[str], width: int) -> RenderableType:
    """Show the differences in the aspects that were asked for, and a verdict."""
    return render(_differences(found, asked), width)


def _differences(found: Difference, asked: Collection[str]) -> Iterator[Table | str]:
    changes = [change for change in found.changes if change.aspect in asked]
    if changes:
        yield _changes(found, changes)
    if "curves" in asked:
        yield from _curves(found)
    if "scores" in asked and found.scores:
        yield _scores(found)
    if "runs" in asked:
        for path, names in ((found.left, found.only_left), (found.right, found.only_right)):
            if names:
                yield f"only in {path}: {', '.join(names)}"
    yield verdict(found, asked)


def verdict(found: Difference, asked: Collection[str]) -> str:
    """Name the aspects that differ and those that do not."""
    unequal = [a for a in ASPECTS if a in asked and found.differs([a])]
    equal = [a for a in ASPECTS if a in asked and a not in unequal]
    if not unequal:
        return f"no difference in {', '.join(equal)}"
    rest = f"; no difference in {', '.join(equal)}" if equal else ""
    return f"they differ in {', '.join(unequal)}{rest}"


def short_names(left: str, right: str) -> tuple[str, str]:
    """Shorten two paths to the ends that distinguish them.

    >>> short_names("runs/2024/study", "runs/2025/study-b")
    ('study', 'study-b')
    >>> short_names("runs/one/fedzmg/seed-0", "runs/two/fedzmg/seed-0")
    ('one/.../seed-0', 'two/.../seed-0')
    """
    ends = [Path(os.path.abspath(path)).parts for path in (left, right)]
    depth = 1
    while ends[0] != ends[1] and ends[0][-depth:] == ends[1][-depth:]:
        depth += 1
    first, second = (
        Path(*(parts[-depth:] if depth < 3 else (parts[-depth], "...", parts[-1]))).as_posix()
        for parts in ends
    )
    return first, second


def _changes(found: Difference, changes: Sequence[Change]) -> Table:
    total, rows = len(found.curves), []
    for change in changes:
        count = len(change.runs)
        runs = "the plan" if not count else "all" if count == total else f"{count} of {total}"
        values = (Cell(_value(value), None, "words") for value in (change.left, change.right))
        rows.append([Cell(f"{change.aspect}: {change.key}"), *values, Cell(runs)])
    heads = ("what", *short_names(found.left, found.right), "runs")
    return Table("", "settings and environment", heads, rows)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:12] if _HASH.fullmatch(text) else text


def _curves(found: Difference) -> Iterator[Table | str]:
    unequal = [pair for pair in found.curves if not pair.identical]
    equal = len(found.curves) - len(unequal)
    if not unequal:
        rounds = sum(pair.shared for pair in found.curves)
        yield f"curves: all {equal} bit-identical ({rounds} lines compared)\n"
        return
    rows = []
    for pair in unequal[:MOST_ROWS]:
        same = pair.rounds[0] == pair.rounds[1]
        numbers = (
            str(pair.shared) if same else "{} and {}".format(*pair.rounds),
            "none as far as both go" if pair.first is None else f"round {pair.first}",
            _largest(pair.largest, "metric"),
            _largest(pair.largest, "loss", "train_loss"),
        )
        fields = Cell(", ".join(pair.fields), None, "words")
        rows.append([Cell(pair.name), *map(Cell, numbers), fields])
    heads = ("run", "lines", "first difference", f"most in {found.metric}", "in losses",
             "differs first in")  # fmt: skip
    yield Table("", f"curves: {equal} of {len(found.curves)} bit-identical", heads, rows)
    if len(unequal) > MOST_ROWS:
        yield f"and {len(unequal) - MOST_ROWS} more\n"


def _largest(largest: Mapping[str, float], *names: str) -> str:
    known = [largest[name] for name in names if name in largest]
    return f"{max(known):.3g}" if known else "-"


def _scores(found: Difference) -> Table:
    metric, rows = found.metric, []
    for pair in found.scores:
        left, right, test = _mean(found, pair.left), _mean(found, pair.right), pair.test
        gap = None if left is None or right is None else left - right
        rows.append([
            pair.name, value_text(left, metric), value_text(right, metric),
            value_text(gap, metric, signed=True), NONE if test is None else f"{test.p:.3g}",
            NONE if test is None else signed_text(test.effect_size),
            NONE if test is None else str(test.n),
        ])  # fmt: skip
    heads = ("algorithm", *short_names(found.left, found.right), "difference", "p", "d_z", "pairs")
    title = f"final {metric}, means over seeds (of a grid: its best point)"
    return Table.of(title, heads, rows)


def _mean(found: Difference, values: Mapping[str, float]) -> float | None:
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return None
    if all(key.startswith("seed ") for key in values):
        return statistics.fmean(values.values())
    return max(finite) if found.higher_is_better else min(finite)


def verify(verdicts: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Show a row per run and, for runs that differ, the facts that changed."""
    differs = any(one["first"] is not None for one in verdicts)
    notes = any(one["note"] for one in verdicts)
    heads = ["run", "reproduced", "rounds"]
    heads += ["first difference", "at most", "differs first in"] * differs + ["note"] * notes
    rows = []
    for one in verdicts:
        row = [Cell(one["name"]), Cell("bit for bit" if one["reproduced"] else "no")]
        row.append(Cell(str(one["rounds"])))
        if differs:
            equal = one["first"] is None
            row.append(Cell("" if equal else f"round {one['first']}"))
            row.append(Cell("" if equal else f"{float(one['size']):.3g}"))
            row.append(Cell(", ".join(one["fields"]), None, "words"))
        row += [Cell(one["note"], None, "words")] * notes
        rows.append(row)
    parts: list[Table | str] = [Table("", "", tuple(heads), rows, words=2)]
    failed = [one for one in verdicts if not one["reproduced"]]
    if failed:
        parts += [_facts(failed), f"not reproduced: {len(failed)} of {len(verdicts)}"]
    else:
        parts.append("this machine reproduces them bit for bit")
    return render(parts, width)


def _facts(failed: Sequence[Mapping[str, Any]]) -> Table | str:
    """Collect the facts that changed, those of several runs once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in failed:
        for fact in one["facts"]:
            row = fact["name"], _value(fact["then"]), _value(fact["now"])
            found.setdefault(row, []).append(one["name"])
    if not found:
        return "versions, machine and execution path are unchanged"
    rows = [
        [*row, "all" if len(runs) == len(failed) else ", ".join(runs)]
        for row, runs in found.items()
    ]
    return Table.of("changed facts", ("fact", "recorded", "here", "runs"), rows, words=4)
