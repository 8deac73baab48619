"""Progress of downloads and conversions: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedzmg.results.formatting import bytes_text, plain
from fedzmg.terminal.render import say

LINE_SECONDS = 5.0


class Downloads:
    """Display of pieces of work that follow one another.

    Args:
        console: a terminal gets bars, anything else a plain line now and then.
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
        self._what, self._total, self._printed = "", None, 0.0  # type: str, int | None, float

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Start a piece of work of ``total`` bytes, or of unknown size."""
        if (what, total) == (self._what, self._total) and self._bar is not None:
            return  # another attempt at the same piece
        self._finish()
        self._what, self._total, self._printed = what, total, time.monotonic()
        self._bar = self._bars.add_task(plain(what), total=total, note="")
        if not self._console.is_terminal:
            self.say(what if total is None else f"{what}: {bytes_text(total)}")

    def advance(self, done: int) -> None:
        """Show that so many bytes are done."""
        whole = "" if self._total is None else f" of {bytes_text(self._total)}"
        note = f"{bytes_text(done)}{whole}"
        if self._bar is not None:
            self._bars.update(self._bar, completed=done, note=note)
        if not self._console.is_terminal and time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            self.say(f"{self._what}: {note}")

    def say(self, text: str) -> None:
        """Print a line."""
        say(self._console, text)

    def _finish(self) -> None:
        if self._bar is not None:
            total = self._total or 1
            self._bars.update(self._bar, total=total, completed=total)
