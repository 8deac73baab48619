"""How far the work is: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedzmg.report.tables import metric_text

LINE_SECONDS = 5.0


class Display:
    """Shows packs of trials as they train.

    Args:
        console: where to show it; anything but a terminal gets a plain line now and then.
        metric: name of the metric, for its format.
    """

    def __init__(self, console: Console, metric: str) -> None:
        self._console, self._metric = console, metric
        self._bars = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._label, self._rounds, self._note = "", 0, ""
        self._printed = 0.0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def begin(self, label: str, rounds: int, done: int) -> None:
        """A pack starts, goes on after ``done`` rounds, or is complete already."""
        self._label, self._rounds, self._note = label, rounds, ""
        self._bar = self._bars.add_task(label, total=rounds, completed=done, note="")
        if done:
            state = "complete already" if done == rounds else f"goes on after round {done}"
            self.say(f"{label}: {state}")
        self._printed = time.monotonic()

    def advance(self, report: Any) -> None:
        """A round is finished."""
        scores = [r.metric for r in report.records if r.metric is not None]
        if scores:
            mean = metric_text(sum(scores) / len(scores), self._metric)
            self._note = f"{self._metric} {mean}"
            diverged = sum(r.diverged for r in report.records)
            self._note += f", {diverged} diverged" if diverged else ""
        if self._bar is not None:
            self._bars.update(self._bar, completed=report.round, note=self._note)
        last = report.round == self._rounds
        if not self._console.is_terminal and (
            last or time.monotonic() - self._printed > LINE_SECONDS
        ):
            self._printed = time.monotonic()
            self.say(f"{self._label}: round {report.round} of {self._rounds}, {self._note}")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, soft_wrap=True)
