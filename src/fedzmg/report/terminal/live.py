"""How far the work is: every packed trial in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedzmg.results.formatting import duration, value_text

LINE_SECONDS = 5.0
MOST_LINES = 8
"""Trials that get a line each; of more of them the best are shown."""
BEST_SHOWN = 3
_LEAST_ROUNDS = 2
"""Rounds before anything is said about the time left: the first one warms up."""


class Seen(NamedTuple):
    """What is known of one trial of a pack."""

    name: str
    metric: float | None = None
    """After the last evaluation."""
    evaluated: int = 0
    """Round of the last evaluation."""
    best: float | None = None
    best_index: int = 0
    """Index of the round with the best evaluation: round 1 has the index 0."""
    trained: int = 0
    """Its last round."""
    train_loss: float = math.nan
    """In that round."""
    diverged: int | None = None
    stopped: int | None = None

    def after(self, record: Any, *, stopped_trials: bool, higher: bool) -> Seen:
        """The same, one round later; a round in which it rested brings nothing new."""
        if stopped_trials and self.stopped is not None:
            return self
        new = self._replace(train_loss=record.train_loss, trained=record.round)
        if record.diverged and self.diverged is None:
            new = new._replace(diverged=record.round)
        if stopped_trials:
            new = new._replace(stopped=record.round)
        if record.metric is None:
            return new
        better = self.best is None or (record.metric > self.best) == higher
        if better and record.metric != self.best and not record.diverged:
            new = new._replace(best=record.metric, best_index=record.round - 1)
        return new._replace(metric=record.metric, evaluated=record.round)

    @property
    def state(self) -> str:
        """In a word or two; nothing for a trial that trains."""
        if self.stopped is not None:
            why = "" if self.diverged is None else "diverged, "
            return f"{why}stopped after round {self.stopped}"
        return "" if self.diverged is None else f"diverged in round {self.diverged}"


class Display:
    """Shows packs of trials as they train.

    Args:
        console: where to show it; anything but a terminal gets a plain line now and then.
        metric: name of the metric, for its format.
        packs: how many packs every algorithm has, so that the time for all of them can be told.
        sizes: how large a pack of each is, if they differ.
    """

    def __init__(
        self,
        console: Console,
        metric: str,
        packs: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._console, self._metric = console, metric
        self._to_come, self._sizes = dict(packs or {}), dict(sizes or {})
        self._label, self._rounds, self._round = "", 0, 0
        self._begun, self._first = 0.0, 0
        self._trials: list[Seen] = []
        self._higher = True
        self._printed = 0.0
        self._live = Live(
            console=console, get_renderable=self._view, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._leave()
            self._live.stop()

    def begin(self, label: str, rounds: int, done: int) -> None:
        """A pack starts, goes on after ``done`` rounds, or is complete already."""
        self._leave()
        self._label, self._rounds, self._round, self._trials = label, rounds, done, []
        self._first, self._begun = done, time.monotonic()
        left = self._to_come.get(label, 1)
        self._to_come[label] = 0 if done == rounds else max(left - 1, 0)
        if done:
            state = "complete already" if done == rounds else f"goes on after round {done}"
            self.say(f"{label}: {state}")
        self._printed = time.monotonic()

    def advance(self, report: Any) -> None:
        """A round is finished."""
        simulation = report.simulation
        self._round, self._higher = report.round, simulation.task.metric.higher_is_better
        if len(self._trials) != len(report.records):
            self._trials = [Seen(name) for name in names(simulation.trials)]
        if report.round - self._first == 1:
            self._begun = time.monotonic()  # the first round also chooses and compiles
        self._trials = [
            seen.after(record, stopped_trials=i in simulation.stopped_trials, higher=self._higher)
            for i, (seen, record) in enumerate(zip(self._trials, report.records, strict=True))
        ]
        if self._console.is_terminal:
            return
        last = report.round == self._rounds or len(simulation.stopped_trials) == len(report.records)
        if last or time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            self.say(self._line())

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _leave(self) -> None:
        """What stays on the screen of a pack that is no longer at work."""
        if self._console.is_terminal and self._trials:
            self.say(self._line())
            self._trials = []

    def _line(self) -> str:
        """All of a pack in one line."""
        parts = [f"{self._label}: round {self._round} of {self._rounds}", self.summary()]
        left = self._left()
        at_work = any(seen.stopped is None for seen in self._trials)
        if left is not None and self._round < self._rounds and at_work:
            parts.append(f"{duration(left)} left")
        return ", ".join(part for part in parts if part)

    def summary(self) -> str:
        """Best so far, median and what became of trials, for all of a pack."""
        shown = [seen for seen in self._trials if seen.best is not None]
        many = len(self._trials) > 1
        words = [f"{len(self._trials)} trials"] if many else []
        # A grid evaluates its first round and the last ones only: what is old is said to be so.
        at = max((seen.evaluated for seen in self._trials), default=0)
        old = at < max((seen.trained for seen in self._trials), default=0)
        losses = [s.train_loss for s in self._trials if math.isfinite(s.train_loss)]
        if losses and (old or not shown):
            words.append(f"training loss {statistics.median(losses):.4g}")
        if shown:
            best = self._ranked()[0]
            whose = f" ({best.name})" if many else ""
            what = f"{self._metric} up to round {at}: best" if old else f"best {self._metric}"
            words.append(f"{what} {self._text(best.best)}{whose}")
            last = [s.metric for s in self._trials if s.metric is not None]
            which = "median" if many else "last" if old else "now"
            words.append(f"{which} {self._text(statistics.median(last))}")
        for what in ("diverged", "stopped"):
            count = sum(getattr(seen, what) is not None for seen in self._trials)
            words += [f"{count} {what}"] if count else []
        return ", ".join(words)

    def _ranked(self) -> list[Seen]:
        sign = -1 if self._higher else 1
        shown = [seen for seen in self._trials if seen.best is not None]
        shown = [seen for seen in shown if seen.diverged is None] or shown
        return sorted(shown, key=lambda seen: sign * (seen.best or 0.0))

    def _text(self, value: float | None) -> str:
        return "" if value is None else value_text(value, self._metric)

    def _left(self) -> float | None:
        """Seconds until this pack is done; None if it is too early to say."""
        # The clock starts after the first round.
        measured = self._round - self._first - 1
        if measured < _LEAST_ROUNDS - 1:
            return None
        each = (time.monotonic() - self._begun) / measured
        return each * (self._rounds - self._round)

    def _left_in_all(self) -> float | None:
        """Seconds until everything is done, if packs take as long as this one, by their size."""
        here, own = self._left(), self._sizes.get(self._label, 1)
        packs = sum(n * self._sizes.get(name, 1) / own for name, n in self._to_come.items())
        measured = self._round - self._first - 1
        if here is None or not packs or measured < 1:
            return None
        each = (time.monotonic() - self._begun) / measured
        return here + each * self._rounds * packs

    def _view(self) -> Group:
        """What a terminal shows of the pack at work."""
        if not self._label or (self._round == self._rounds and not self._trials):
            return Group()
        head = Table.grid(padding=(0, 2))
        left, total = self._left(), self._left_in_all()
        cells: list[Any] = [
            Text(self._label, style="bold"),
            ProgressBar(total=self._rounds, completed=self._round, width=28),
            f"round {self._round} of {self._rounds}",
        ]
        if left is not None:
            cells.append(f"{duration(left)} left")
        if total is not None:
            cells.append(Text(f"{duration(total)} left in all", style="dim"))
        head.add_row(*cells)
        if not self._trials:
            return Group(head)
        return Group(head, Text(f"  {self.summary()}", overflow="ellipsis"), self._table())

    def _table(self) -> Table:
        """A line per trial, or the best of many."""
        few = len(self._trials) <= MOST_LINES
        table = Table.grid(padding=(0, 2))
        # In a narrow window only names are shortened.
        table.add_column(no_wrap=True)
        for least in (8, 24):
            table.add_column(justify="right", no_wrap=True, min_width=least)
        table.add_column(no_wrap=True)
        for seen in self._trials if few else self._ranked()[:BEST_SHOWN]:
            style = "dim" if seen.state else ""
            best = ""
            if seen.best is not None:
                best = f"best {self._text(seen.best)} at index {seen.best_index}"
            now = f"loss {seen.train_loss:.4g}"
            if seen.metric is not None and seen.evaluated == seen.trained:
                now = self._text(seen.metric)
            table.add_row(f"    {seen.name}", now, best, seen.state, style=style)
        return table


def names(trials: Any) -> list[str]:
    """What tells the trials of a pack apart: their seeds, and names or options that differ."""
    if len({trial.name for trial in trials}) > 1:
        return [f"{trial.name}, seed {trial.seed}" for trial in trials]
    options = [trial.algorithm.options() for trial in trials]
    keys = [key for key in options[0] if len({str(own.get(key)) for own in options}) > 1]
    seeded = len({trial.seed for trial in trials}) > 1 or not keys
    found = []
    for trial, own in zip(trials, options, strict=True):
        parts = [f"{key} {_short(own.get(key))}" for key in keys]
        found.append(", ".join([*parts, *([f"seed {trial.seed}"] if seeded else [])]))
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
