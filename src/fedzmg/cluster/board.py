"""Message board of a training, an actor of its own: it imports no torch, so it starts at once."""

from typing import Any


class Board:
    """Messages of workers that the driver has not read yet, and its wish to stop."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Any]] = []
        self._stops = False

    def post(self, label: str, message: Any) -> bool:
        """Add a message, if there is one; return True if the worker should stop."""
        self._messages += [(label, message)] * (message is not None)
        return self._stops

    def stop(self) -> None:
        self._stops = True

    def take(self) -> list[tuple[str, Any]]:
        found, self._messages = self._messages, []
        return found
