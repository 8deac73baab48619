"""Progress of training and of downloads: live in a terminal, plain lines elsewhere."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedzmg.plain_text import plain
from fedzmg.results.formatting import bytes_text, duration, setting_text, value_text
from fedzmg.results.runs import unusual_clients
from fedzmg.terminal.render import Terminal, bold

if TYPE_CHECKING:  # which loads torch
    from fedzmg.experiment.progress import PackRounds

LINE_SECONDS = 5.0
MOST_LINES = 8  # trials that get a line each; of more trials only the best are shown
BEST_SHOWN = 3


@dataclass
class TrialState:
    """Records of some rounds of a trial; None if there is no such round."""

    name: str
    last: Any
    evaluated: Any = None
    best: Any = None
    diverged: int | None = None
    stopped: int | None = None

    def update(self, record: Any, *, stopped: bool, sign: int) -> None:
        """Take over a round, a metric times ``sign`` being better if higher; not once stopped."""
        if self.stopped is not None:
            return
        self.last = record
        if record.diverged and self.diverged is None:
            self.diverged = record.round
        if stopped:
            self.stopped = record.round
        if record.metric is not None:
            self.evaluated = record
            better = self.best is None or sign * record.metric > sign * self.best.metric
            if better and not record.diverged:
                self.best = record

    @property
    def state(self) -> str:
        """Divergence and stopping; empty for a trial that trains."""
        if self.stopped is not None:
            why = "" if self.diverged is None else "diverged, "
            return f"{why}stopped after round {self.stopped}"
        return "" if self.diverged is None else f"diverged in round {self.diverged}"


class Display:
    """Live view of packs of trials in a terminal, else a plain line now and then."""

    def __init__(
        self, console: Terminal, metric: str, packs: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._console, self._metric, self.say = console, metric, console.say
        self._to_come, self._sizes = dict(packs or {}), dict(sizes or {})
        self._label, self._rounds, self._round, self._first, self._stored = "", 0, 0, 0, 0
        self._begun = self._printed = 0.0
        self._remote: dict[str, PackRounds] = {}
        self._trials: list[TrialState] = []
        self._unusual: list[tuple[int, Any, Any]] = []
        self._sign = 1
        self._live = Live(console=console, get_renderable=self._view, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        self._live.stop()

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Start a pack, of which ``done`` rounds are trained already."""
        self._leave()
        self._label, self._rounds, self._round, self._first = label, rounds, done, done
        self._to_come[label] = 0 if done == rounds else max(self._to_come.get(label, 1) - 1, 0)
        if done:
            state = "complete already" if done == rounds else f"continues after round {done}"
            self.say(f"{label}: {state}")
        self._begun = self._printed = time.monotonic()

    def advance(self, report: Any) -> None:
        simulation, self._round = report.simulation, report.round
        self._sign = 1 if simulation.task.metric.higher_is_better else -1
        if len(self._trials) != len(report.records):
            named = zip(names(simulation.trials), report.records, strict=True)
            self._trials = [TrialState(*one) for one in named]
        if report.round - self._first == 1:
            self._begun = time.monotonic()  # the first round also chooses and compiles
        for i, (seen, record) in enumerate(zip(self._trials, report.records, strict=True)):
            seen.update(record, stopped=i in simulation.stopped_trials, sign=self._sign)
            if record.rejected or record.flagged:
                self._unusual.append((record.round, record.rejected, record.flagged))
        last = report.round == self._rounds or len(simulation.stopped_trials) == len(report.records)
        due = last or time.monotonic() - self._printed > LINE_SECONDS
        if due and not self._console.is_terminal:
            self._printed = time.monotonic()
            self.say(self._line())

    def show_packs(self, packs: "Mapping[str, PackRounds]") -> None:
        before, self._round = self._round, sum(done for done, *_ in packs.values())
        if self._remote.keys() != packs.keys():
            before = self._stored = self._round
            self._rounds = sum(rounds for _, rounds, _ in packs.values())
        if before == self._stored:  # the clock starts with the first round
            self._begun, self._first = time.monotonic(), self._round
        self._remote = dict(packs)
        due = bool(packs) and time.monotonic() - self._printed > LINE_SECONDS
        if due and not self._console.is_terminal:
            self._printed = time.monotonic()
            shown = [f"{name}: {self._state(*one)}" for name, one in self._at_work()]
            self.say("; ".join([*shown, self._whole()]))

    def _at_work(self) -> list[tuple[str, "PackRounds"]]:
        """Return packs in other processes that have begun and not ended, as many as are shown."""
        found = [(name, one) for name, one in self._remote.items() if 0 < one[0] < one[1]]
        return found[:MOST_LINES]

    def _whole(self) -> str:
        ended = sum(done == rounds for done, rounds, _ in self._remote.values())
        text, (left, _) = f"{ended} of {len(self._remote)} packs trained", self._left()
        return text if left is None else f"{text}, {duration(left)} left"

    def _state(self, done: int, rounds: int, metric: float | None = None) -> str:
        text = f"round {done} of {rounds}"
        if metric is None:
            return text
        return f"{text}, median {self._metric} {value_text(metric, self._metric)}"

    def _leave(self) -> None:
        """Leave one line of a pack that has ended, and of each client with unusual uploads."""
        if self._console.is_terminal and self._trials:
            self.say(self._line())
        clients = unusual_clients(self._unusual)
        for client in clients[:MOST_LINES]:
            self.say(str(client))
        if len(clients) > MOST_LINES:
            self.say(f"{len(clients) - MOST_LINES} more clients had such updates")
        self._trials, self._unusual = [], []

    def _line(self) -> str:
        parts = [f"{self._label}: round {self._round} of {self._rounds}", *self._summary()]
        left, _ = self._left()
        at_work = any(seen.stopped is None for seen in self._trials)
        if left is not None and self._round < self._rounds and at_work:
            parts.append(f"{duration(left)} left")
        return ", ".join(parts)

    def _summary(self) -> Iterator[str]:
        shown, trials, many = self._ranked(), self._trials, len(self._trials) > 1
        if many:
            yield f"{len(trials)} trials"
        evaluated = [seen.evaluated for seen in trials if seen.evaluated is not None]
        # A grid evaluates only its first and last rounds: an old evaluation names its round.
        at = max((record.round for record in evaluated), default=0)
        old = at < max((seen.last.round for seen in trials), default=0)
        losses = [s.last.train_loss for s in trials if math.isfinite(s.last.train_loss)]
        if losses and (old or not shown):
            yield f"training loss {statistics.median(losses):.4g}"
        if shown:
            whose = f" ({shown[0].name})" if many else ""
            what = f"{self._metric} up to round {at}: best" if old else f"best {self._metric}"
            yield f"{what} {value_text(shown[0].best.metric, self._metric)}{whose}"
            last = statistics.median(record.metric for record in evaluated)
            yield f"{'median' if many else 'last'} {value_text(last, self._metric)}"
        for what in ("diverged", "stopped"):
            count = sum(getattr(seen, what) is not None for seen in trials)
            if count:
                yield f"{count} {what}"

    def _ranked(self) -> list[TrialState]:
        shown = [seen for seen in self._trials if seen.best is not None]
        shown = [seen for seen in shown if seen.diverged is None] or shown
        return sorted(shown, key=lambda seen: -self._sign * seen.best.metric)

    def _left(self) -> tuple[float | None, float | None]:
        """Estimate the seconds left for this pack and for all packs, which scale with size."""
        measured = self._round - self._first - 1  # the clock starts after the first round
        if measured < 1:
            return None, None
        each = (time.monotonic() - self._begun) / measured
        here, own = each * (self._rounds - self._round), self._sizes.get(self._label, 1)
        packs = sum(n * self._sizes.get(name, 1) / own for name, n in self._to_come.items())
        return here, here + each * self._rounds * packs if packs else None

    def _bar(self, label: str, *state: Any) -> list[Any]:
        done, rounds = state[:2]
        bar = ProgressBar(total=rounds, completed=done, width=28)
        return [bold(label), bar, self._state(*state)]

    def _view(self) -> Group:
        """Draw the progress of a pack and a line per trial, or the best of many."""
        if self._remote:
            table = Table.grid(padding=(0, 2))
            for label, one in self._at_work():
                table.add_row(*self._bar(label, *one))
            return Group(table, Text(self._whole()))
        if not self._label or (self._round == self._rounds and not self._trials):
            return Group()
        cells = self._bar(self._label, self._round, self._rounds)
        for seconds, words in zip(self._left(), ("left", "left in all"), strict=True):
            cells += [] if seconds is None else [f"{duration(seconds)} {words}"]
        head = Table.grid(padding=(0, 2))
        head.add_row(*cells)
        parts: list[RenderableType] = [head]
        if self._trials:
            parts.append(Text(f"  {plain(', '.join(self._summary()))}", overflow="ellipsis"))
        table = Table.grid("", padding=(0, 2))
        for least in (8, 24):  # only names are shortened in a narrow terminal
            table.add_column(justify="right", no_wrap=True, min_width=least)
        few = len(self._trials) <= MOST_LINES
        for seen in self._trials if few else self._ranked()[:BEST_SHOWN]:
            best, now = "", f"loss {seen.last.train_loss:.4g}"
            if (top := seen.best) is not None:
                best = f"best {value_text(top.metric, self._metric)} at round {top.round}"
            if seen.evaluated is seen.last:
                now = value_text(seen.last.metric, self._metric)
            name = Text(plain(f"    {seen.name}"), no_wrap=True, overflow="ellipsis")
            table.add_row(name, now, best, seen.state, style="dim" if seen.state else "")
        return Group(*parts, table)


def names(trials: Any) -> list[str]:
    """Name the trials of a pack by seed and by the names or options that differ."""
    if len({trial.name for trial in trials}) > 1:
        return [f"{trial.name}, seed {trial.seed}" for trial in trials]
    options = [trial.algorithm.options() for trial in trials]
    keys = [key for key in options[0] if len({str(own.get(key)) for own in options}) > 1]
    seeded = len({trial.seed for trial in trials}) > 1 or not keys
    found = []
    for trial, own in zip(trials, options, strict=True):
        values = [f"{key} {setting_text(own.get(key))}" for key in keys]
        found.append(", ".join(values + [f"seed {trial.seed}"] * seeded))
    return found


class Downloads:
    """Bars of pieces of work in a terminal, else a plain line now and then."""

    def __init__(self, console: Terminal) -> None:
        name = TextColumn("{task.description:<24}", markup=False)
        columns = (name, BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._console, self._printed, self.say = console, 0.0, console.say

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self._finish()
        self._bars.stop()

    def begin(self, what: str, total: int | None) -> None:
        """Start a piece of work of ``total`` bytes, or of unknown size."""
        if (plain(what), total) in [(bar.description, bar.total) for bar in self._bars.tasks[-1:]]:
            return  # another attempt at the same piece
        self._finish()
        self._bars.add_task(plain(what), total=total)
        self._printed = time.monotonic()
        if not self._console.is_terminal:
            self.say(what if total is None else f"{what}: {bytes_text(total)}")

    def advance(self, done: int) -> None:
        bar = self._bars.tasks[-1]
        self._bars.update(bar.id, completed=done)
        if not self._console.is_terminal and time.monotonic() - self._printed > LINE_SECONDS:
            self._printed = time.monotonic()
            whole = "" if bar.total is None else f" of {bytes_text(bar.total)}"
            self.say(f"{bar.description}: {bytes_text(done)}{whole}")

    def _finish(self) -> None:
        for bar in self._bars.tasks[-1:]:
            self._bars.update(bar.id, total=bar.total or 1, completed=bar.total or 1)
