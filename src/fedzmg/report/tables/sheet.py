"""What a table is made of."""

from __future__ import annotations

from typing import NamedTuple

from fedzmg.results.formatting import NONE

Value = float | int | str | bool | None
Record = dict[str, Value]


class Cell(NamedTuple):
    """What is shown, and the number behind it to sort by."""

    text: str
    value: float | None = None
    kind: str = ""
    """``best``, ``yes``, ``quiet`` or ``words``, which are long."""


class Sheet(NamedTuple):
    """A table with its words."""

    key: str
    title: str
    heads: tuple[str, ...]
    rows: list[list[Cell]]
    caption: str
    records: list[Record]
    """The same with full precision, one flat record per row or finer."""
    words: int = 1
    """So many columns at the start are words, not numbers."""
    advice: str = ""
    """How to read it, in plain words."""


NOTHING = Cell(NONE, None, "quiet")
"""Where there is no number."""
