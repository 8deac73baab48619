"""Terminal output of ``fedzmg diff``, ``fedzmg verify`` and ``fedzmg watch``."""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from rich.console import RenderableType

from fedzmg.provenance import PYTHON
from fedzmg.report.tables.table import Cell, Table, words
from fedzmg.results.diff import ASPECTS, CURVES, Change, Difference
from fedzmg.results.formatting import NONE, duration, signed_text, value_text
from fedzmg.results.watch import State, Training, Work
from fedzmg.terminal.render import bold, render

MOST_RUNS = 30  # runs that are shown one by one; more of them are grouped by algorithm
FIRST: tuple[State, ...] = ("running", "interrupted", "diverged", "stopped", "done", "waiting")
"""Row priority when the terminal is too short."""


def diff(found: Difference, asked: Collection[str], width: int) -> RenderableType:
    """Show the differences in the aspects that were asked for, and a verdict."""
    parts: list[Table | str] = [f"A: {found.left}", f"B: {found.right}", ""]
    changes = [change for change in found.changes if change.aspect in asked]
    if changes:
        parts.append(_changes(found, changes))
    if "curves" in asked:
        parts += _curves(found)
    if "scores" in asked and found.scores:
        parts.append(_scores(found))
    if "runs" in asked:
        sides = {"A": found.only_left, "B": found.only_right}
        parts += [f"only in {side}: {', '.join(names)}" for side, names in sides.items() if names]
    unequal = [a for a in ASPECTS if a in asked and found.differs([a])]
    equal = [a for a in ASPECTS if a in asked and a not in unequal]
    both = {"they differ in": unequal, "no difference in": equal}
    verdict = [f"{what} {', '.join(names)}" for what, names in both.items() if names]
    return render([*parts, "; ".join(verdict)], width)


def _changes(found: Difference, changes: Sequence[Change]) -> Table:
    rows = [
        [Cell(f"{change.aspect}: {change.key}"), *map(_value, (change.left, change.right)),
         Cell(f"{len(change.runs)} of {len(found.curves)}" if change.runs else "the plan")]
        for change in changes
    ]  # fmt: skip
    return Table("", "settings and environment", ("what", "A", "B", "runs"), rows)


def _value(value: Any) -> Cell:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return words(text[:12] if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else text)


def _curves(found: Difference) -> Iterator[Table | str]:
    unequal, total = [pair for pair in found.curves if not pair.identical], len(found.curves)
    title = f"curves: {total - len(unequal)} of {total} bit-identical"
    if not unequal:
        yield from (f"{title} ({sum(pair.shared for pair in found.curves)} lines compared)", "")
        return
    rows = [
        [*map(Cell, (
            pair.name, " and ".join(map(str, dict.fromkeys(pair.rounds))),
            "none as far as both go" if pair.first is None else f"round {pair.first}",
            *(f"{pair.largest[name]:.3g}" if name in pair.largest else "-" for name in CURVES),
         )), words(", ".join(pair.fields))]
        for pair in unequal
    ]  # fmt: skip
    heads = ("run", "lines", "first difference", f"most in {found.metric}", "in loss",
             "in training loss", "differs first in")  # fmt: skip
    yield Table("", title, heads, rows)


def _scores(found: Difference) -> Table:
    metric, rows = found.metric, []
    for pair in found.scores:
        left, right = _mean(found, pair.left), _mean(found, pair.right)
        gap = None if left is None or right is None else left - right
        means = (value_text(left, metric), value_text(right, metric))
        tested = [NONE] * 3
        if pair.test is not None:
            tested = [f"{pair.test.p:.3g}", signed_text(pair.test.effect_size), str(pair.test.n)]
        rows.append([pair.name, *means, value_text(gap, metric, signed=True), *tested])
    heads = ("algorithm", "A", "B", "difference", "p", "d_z", "pairs")
    return Table.of(f"final {metric}, means over common seeds (of a grid: best point)", heads, rows)


def _mean(found: Difference, values: Mapping[str, float]) -> float | None:
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return None
    if all(key.startswith("seed ") for key in values):
        return statistics.fmean(values.values())
    return max(finite) if found.higher_is_better else min(finite)


def verify(verdicts: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Show a row per run and, for runs that differ, the facts that changed."""
    rows = []
    for one in verdicts:
        differs = one["first"] is not None
        rows.append([
            Cell(one["name"]), Cell("bit for bit" if one["reproduced"] else "no"),
            Cell(str(one["rounds"])), Cell(f"round {one['first']}" if differs else ""),
            Cell(f"{float(one['size']):.3g}" if differs else ""),
            words(", ".join(one["fields"])), words(one["note"]),
        ])  # fmt: skip
    heads = ("run", "reproduced", "rounds", "first difference", "at most", "differs first in",
             "note")  # fmt: skip
    parts: list[Table | str] = [Table("", "", heads, rows, words=2)]
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
            row = fact["name"], _value(fact["then"]).text, _value(fact["now"]).text
            found.setdefault(row, []).append(one["name"])
    if not found:
        return "versions, machine and execution path are unchanged"
    names = ("all" if len(runs) == len(failed) else ", ".join(runs) for runs in found.values())
    rows = [[*row, name] for row, name in zip(found, names, strict=True)]
    return Table.of("changed facts", ("fact", "recorded", "here", "runs"), rows, words=4)


def screen(works: Iterable[Work], width: int) -> RenderableType:
    """Show work, what moves first: a terminal that is too short cuts off the end."""
    parts: list[Table | RenderableType] = []
    for work in sorted(works, key=lambda work: not work.alive):
        title = f"{work.directory}: {work.kind} of {work.task}" if work.task else work.directory
        parts += [bold(title), *_progress(work)]
        if work.owner is not None:
            parts.append(f"held by {work.owner}{'' if work.alive else ', which is gone'}")
        parts += ["", *([_table(work)] if work.trainings else [])]
    return render(parts, width)


def _table(work: Work) -> Table:
    """Make a row per training, or per algorithm with its best training."""
    each = work.kind != "grid" and len(work.trainings) <= MOST_RUNS
    groups: dict[str, list[Training]] = {}
    for one in sorted(work.trainings, key=lambda one: FIRST.index(one.state) if each else 0):
        groups.setdefault(one.name if each else one.group, []).append(one)
    rows = []
    for own in groups.values():
        first, best = own[0], work._replace(trainings=tuple(own)).best
        shown = first if each else best
        remark = first.why if each else best.point if best else ""
        rows.append([
            Cell(first.shown if each else first.label),
            Cell(first.state, None, first.state) if each else Cell(states(own)),
            Cell(f"{_rounds(own)} / {first.rounds}"), Cell(_metric(work, shown)), words(remark),
        ])  # fmt: skip
    heads = ("run", "state", "round", work.metric, "why")
    if not each:
        heads = ("algorithm", "state", "round", f"best {work.metric}", "best run")
    return Table("", "", heads, rows, words=2)


def line(work: Work) -> str:
    """Describe a piece of work in one line."""
    return f"{work.directory}: {', '.join(_progress(work))}"


def _progress(work: Work) -> list[str]:
    """Describe states, rounds, the best run, and the time left or the way to continue."""
    found, best = [], work.best
    if work.trainings:
        current = [one for one in work.trainings if one.state == "running"] or work.trainings
        found += [states(work.trainings), f"round {_rounds(current)} of {current[0].rounds}"]
    if best is not None:
        after = f", after round {best.evaluated}" if (best.evaluated or 0) < best.round else ""
        found.append(f"best {work.metric} {_metric(work, best)} ({best.shown}{after})")
    if work.complete:
        return found
    if not work.alive:
        remedy = f"run the same command again to continue: {work.command}".removesuffix(": ")
        if work.command == PYTHON:
            call = "tune" if work.kind == "grid" else "compare"
            remedy = f"make the same call of fedzmg.{call} again to continue"
        return [*found, f"nobody is at work: {remedy}"]
    if work.rate is not None:
        running = sum(one.state == "running" for one in work.trainings)
        beside = f" of {running} side by side" if running > 1 else ""
        found.append(f"{work.rate:.3g} rounds/s{beside}")
    left = work.seconds_left
    return found + ([] if left is None else [f"about {duration(left)} left"]) or ["starting"]


def states(trainings: Iterable[Training]) -> str:
    """Count trainings by state."""
    count = Counter(one.state for one in trainings)
    order = reversed(get_args(State))
    return ", ".join(f"{count[state]} {state}" for state in order if count[state])


def _rounds(trainings: Sequence[Training]) -> str:
    low, high = (extreme(one.round for one in trainings) for extreme in (min, max))
    return str(low) if low == high else f"{low} to {high}"


def _metric(work: Work, one: Training | None) -> str:
    return "" if one is None or one.metric is None else value_text(one.metric, work.metric)
