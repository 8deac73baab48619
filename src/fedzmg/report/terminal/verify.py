"""What ``fedzmg verify`` shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report.terminal.stacked import Column, fits, said_below, stacked


def screen(verdicts: Sequence[Mapping[str, Any]], width: int) -> Iterator[RenderableType]:
    """A row per run; where bits differ, what is not as it was.

    Args:
        verdicts: of runs.
        width: of the terminal.
    """
    names = Column("run", [one["name"] for one in verdicts])
    columns = _columns(verdicts)
    notes = Column("note", [one["note"] for one in verdicts], words=True)
    if any(notes.cells) and fits(names, [*columns, notes], width):
        yield from stacked(names, [*columns, notes], width)
    else:
        yield from stacked(names, columns, width)
        yield from map(Text, said_below(names, notes))
    failed = [one for one in verdicts if not one["reproduced"]]
    if not failed:
        yield Text("this machine reproduces them bit for bit")
        return
    yield from _facts(failed)
    yield Text(f"not reproduced: {len(failed)} of {len(verdicts)}")


def _columns(verdicts: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [
        Column("rounds", [str(one["rounds"]) for one in verdicts]),
        Column(
            "reproduced",
            ["bit for bit" if one["reproduced"] else "no" for one in verdicts],
            words=True,
        ),
    ]
    firsts = [one["first"] for one in verdicts]
    if all(first is None for first in firsts):
        return columns
    sizes = ["" if one["first"] is None else f"{float(one['size']):.3g}" for one in verdicts]
    return [
        *columns,
        Column(
            "first\ndifference", ["" if first is None else f"round {first}" for first in firsts]
        ),
        Column("at most", sizes),
        Column("differs first in", [", ".join(one["fields"]) for one in verdicts], words=True),
    ]


def _facts(failed: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """Circumstances that differ, those of several runs once."""
    found: dict[str, tuple[str, str, str, list[str]]] = {}
    for one in failed:
        for fact in one["facts"]:
            row = fact["name"], _value(fact["then"]), _value(fact["now"])
            found.setdefault(json.dumps(row), (*row, []))[-1].append(one["name"])
    if not found:
        yield Text("versions, machine and execution path are as they were")
        return
    table = Table(
        title="what is not as it was", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for head in ("fact", "recorded", "here", "runs"):
        table.add_column(head, overflow="fold")
    for name, then, now, runs in found.values():
        table.add_row(name, then, now, "all" if len(runs) == len(failed) else ", ".join(runs))
    yield table


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    # A hash needs no more than its beginning.
    return text[:12] if len(text) == 64 and " " not in text else text
