"""Data sets: which are here, and how far a download or a conversion is.

Bars in a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedzmg.report.terminal.tables import listing
from fedzmg.results.formatting import bytes_text

LINE_SECONDS = 5.0


class Downloads:
    """Shows pieces of work one after the other.

    Args:
        console: where to show it; anything but a terminal gets a plain line now and then.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<24}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._total: int | None = None
        self._what, self._printed = "", 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def begin(self, what: str, total: int | None) -> None:
        """A piece of work starts; ``total`` bytes where that is known."""
        if (what, total) == (self._what, self._total) and self._bar is not None:
            return  # the same piece again, after a failed attempt
        self._finish()
        self._what, self._total, self._printed = what, total, time.monotonic()
        self._bar = self._bars.add_task(what, total=total, note="")
        if not self._console.is_terminal:
            self.say(what if total is None else f"{what}: {bytes_text(total)}")

    def advance(self, done: int) -> None:
        """So many bytes of it are done."""
        whole = "" if self._total is None else f" of {bytes_text(self._total)}"
        note = f"{bytes_text(done)}{whole}"
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, note=note)
        if not self._console.is_terminal and time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            self.say(f"{self._what}: {note}")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _finish(self) -> None:
        """What ended without a word about its size is complete."""
        if self._bar is not None:
            total = self._total or 1
            self._bars.update(self._bar, total=total, completed=total)


def sets(found: Mapping[str, Mapping[str, Any]], width: int) -> Table:
    """The data sets of ``fedzmg data list --json`` as a table."""
    rows = [
        (
            name,
            one["title"],
            _numbers(split["clients"] for split in one["counts"].values()),
            _numbers(split["examples"] for split in one["counts"].values()),
            bytes_text(one["bytes"]) if one["state"] == "here" else one["state"],
        )
        for name, one in found.items()
    ]
    counted = ("clients", "examples", "here")
    return listing(("name", "what it is", *counted), rows, width, right=counted)


def _numbers(values: Iterable[int | None]) -> str:
    """One number where all splits have the same; nothing where there is none."""
    texts = ["" if value is None else f"{value:,}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)
