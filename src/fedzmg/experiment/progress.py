"""Progress protocol of training, shared by displays and trackers."""

from __future__ import annotations

from typing import Protocol

from fedzmg.simulation import RoundReport


class Progress(Protocol):
    """Receives progress updates."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Start a pack, or continue it after ``done`` rounds."""
        ...

    def advance(self, report: RoundReport) -> None:
        """Receive a finished round."""
        ...

    def say(self, text: str) -> None:
        """Show a message to the user."""
        ...


class Silent:
    """Shows nothing."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Ignore the start."""

    def advance(self, report: RoundReport) -> None:
        """Ignore the round."""

    def say(self, text: str) -> None:
        """Ignore the message."""
