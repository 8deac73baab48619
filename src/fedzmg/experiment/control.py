"""Ends of training: early stopping, Ctrl-C, time limits and disks that cannot be written."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from fedzmg.errors import InputError
from fedzmg.experiment.progress import Progress
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import RESTORE, read_json, write_json


class TimeLimitReached(Exception):
    """The time limit is reached; everything finished so far was kept."""

    def __init__(self, done: int, rounds: int) -> None:
        super().__init__(f"time is up after round {done} of {rounds}; nothing is lost")
        self.done, self.rounds = done, rounds


def deadline(minutes: float | None) -> float:
    """Return the end of a time limit on the monotonic clock; None is no limit."""
    if minutes is not None and not minutes > 0:
        raise InputError(f"max-minutes = {minutes!r}: expected a number above 0")
    return math.inf if minutes is None else time.monotonic() + 60 * minutes


@contextlib.contextmanager
def deferred_interrupt(progress: Progress) -> Iterator[threading.Event]:
    """Defer Ctrl-C to the end of a round; a second Ctrl-C stops at once."""
    requested = threading.Event()

    def ask(*_: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        progress.say("stopping after this round; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():  # which receives signals
        yield requested
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def named_write_errors(path: Path | None) -> Iterator[None]:
    """Turn a system error into one line with the results directory; None turns nothing."""
    try:
        yield
    except OSError as error:
        if path is None:
            raise
        raise InputError(
            f"cannot write to {path}: {error.strerror or error}; results so far are complete, run "
            "the same command again when there is room"
        ) from None


def checkpoint_interval(default: float, given: float | None = None) -> float:
    """Return the seconds between checkpoints: those given, the environment's or the default."""
    text = os.environ.get("FEDZMG_CHECKPOINT_SECONDS")
    if given is not None or not text:
        return default if given is None else given
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise InputError(
        f"FEDZMG_CHECKPOINT_SECONDS = {text!r}: expected a number of seconds, at least 0"
    )


Why: TypeAlias = Literal["diverged", "cannot_win", "halving"]
STOPPED = "stopped.json"
FORMAT = 1


class Stopped(NamedTuple):
    """The decision to train a trial no further; it keeps its model and leaves its pack."""

    round: int
    """The last round that it trained; 0 if it never began."""
    why: Why
    words: str
    """The reason in words."""
    at_most: float | None = None
    """Upper bound of the score that the trial or its point could have reached."""

    def line(self) -> dict[str, Any]:
        """Return the decision ready for JSON; a heuristic may stop a trial that would win."""
        return {**self._asdict(), "heuristic": self.why == "halving"}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Stopped:
        """Parse a decision; a wrong value raises ``KeyError``, ``TypeError``, ``ValueError``."""
        if line["why"] not in get_args(Why):
            raise ValueError(f"unknown reason {line['why']!r}")
        return cls(int(line["round"]), line["why"], str(line["words"]), line.get("at_most"))


Ask: TypeAlias = Callable[[RoundReport], Mapping[int, Stopped]]
"""Stopping rule, called after every round; trials by their position in the simulation."""


def newly_diverged(report: RoundReport) -> dict[int, Stopped]:
    """Return trials that diverged and would continue to train."""
    if report.round == report.simulation.rounds:
        return {}
    return {
        i: Stopped(report.round, "diverged", f"diverged in round {report.round}")
        for i, record in enumerate(report.records)
        if record.diverged and i not in report.simulation.stopped_trials
    }


def write_stop(directory: Path, stopped: Stopped) -> None:
    """Write a decision into a run directory."""
    write_json(directory / STOPPED, {"format": FORMAT, **stopped.line()})


def read_stop(directory: Path) -> Stopped | None:
    """Read the decision in a run directory, if there is one."""
    path = directory / STOPPED
    if not path.exists():
        return None
    values = read_json(path, wanted=FORMAT)
    try:
        return Stopped.of(values)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None
