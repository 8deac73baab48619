"""Progress of downloads and conversions: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fedzmg.results.formatting import bytes_text, plain
from fedzmg.terminal.render import say

LINE_SECONDS = 5.0


class Downloads:
    """Bars of pieces of work in a terminal, else a plain line now and then."""

    def __init__(self, console: Console) -> None:
        name = TextColumn("{task.description:<24}", markup=False)
        columns = (name, BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._console, self._printed = console, 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Start a piece of work of ``total`` bytes, or of unknown size."""
        current = [(bar.description, bar.total) for bar in self._bars.tasks[-1:]]
        if (plain(what), total) in current:
            return  # another attempt at the same piece
        self._finish()
        self._bars.add_task(plain(what), total=total)
        self._printed = time.monotonic()
        if not self._console.is_terminal:
            self.say(what if total is None else f"{what}: {bytes_text(total)}")

    def advance(self, done: int) -> None:
        """Show that so many bytes are done."""
        bar = self._bars.tasks[-1]
        self._bars.update(bar.id, completed=done)
        if not self._console.is_terminal and time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            whole = "" if bar.total is None else f" of {bytes_text(bar.total)}"
            self.say(f"{bar.description}: {bytes_text(done)}{whole}")

    def say(self, text: str) -> None:
        """Print a line."""
        say(self._console, text)

    def _finish(self) -> None:
        for bar in self._bars.tasks[-1:]:
            self._bars.update(bar.id, total=bar.total or 1, completed=bar.total or 1)
