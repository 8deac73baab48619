"""Progress protocol of training, shared by displays and trackers."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from fedzmg.simulation import RoundReport

PackRounds: TypeAlias = tuple[int, int, float | None]
"""Rounds done and planned of a pack, and the median of its trials' last metrics."""


class Progress(Protocol):
    """Receives progress updates."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        """Start a pack, or continue it after ``done`` rounds."""
        return

    def advance(self, report: RoundReport) -> None:
        """Receive a finished round."""
        return

    def show_packs(self, packs: Mapping[str, PackRounds]) -> None:
        """Receive how far the packs are that train in other processes."""
        return

    def say(self, text: str) -> None:
        """Show a message to the user."""
        return


class Silent(Progress):
    """Shows nothing."""
