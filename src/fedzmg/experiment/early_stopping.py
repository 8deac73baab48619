"""Early stopping: decisions to train a trial no further, which are off by default.

A stopped trial keeps its model, leaves its pack and has a record with the round and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from fedzmg.errors import InputError
from fedzmg.simulation import RoundReport
from fedzmg.storage.formats import RESTORE, read_json, write_json

Why: TypeAlias = Literal["diverged", "cannot_win", "halving"]
NAME = "stopped.json"
FORMAT = 1


class Stopped(NamedTuple):
    """The decision to stop a trial."""

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


def write(directory: Path, stopped: Stopped) -> None:
    """Write a decision into a run directory."""
    write_json(directory / NAME, {"format": FORMAT, **stopped.line()})


def read(directory: Path) -> Stopped | None:
    """Read the decision in a run directory, if there is one."""
    path = directory / NAME
    if not path.exists():
        return None
    values = read_json(path, wanted=FORMAT)
    try:
        return Stopped.of(values)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): {RESTORE}") from None
