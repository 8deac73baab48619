"""What shows a user how far the work is."""

from __future__ import annotations

from typing import Protocol

from fedzmg.simulation import RoundReport


class Progress(Protocol):
    """Shows a user how far the work is."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """A pack starts, or goes on after ``done`` rounds."""
        ...

    def advance(self, report: RoundReport) -> None:
        """A round is finished."""
        ...

    def say(self, text: str) -> None:
        """Something the user should know."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Nothing."""

    def advance(self, report: RoundReport) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""
