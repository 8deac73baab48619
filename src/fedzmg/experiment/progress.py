"""Progress protocol of training, shared by displays and trackers."""

from typing import Protocol

from fedzmg.simulation import RoundReport


class Progress(Protocol):
    """Receives progress updates."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Start a pack, or continue it after ``done`` rounds."""
        return

    def advance(self, report: RoundReport) -> None:
        """Receive a finished round."""
        return

    def say(self, text: str) -> None:
        """Show a message to the user."""
        return


class Silent(Progress):
    """Shows nothing."""
