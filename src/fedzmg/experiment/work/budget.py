"""A limit of time: work ends cleanly after a round, and the same command goes on."""

from __future__ import annotations

import time

from fedzmg.errors import InputError


class TimeLimitReached(Exception):
    """The time that was allowed is over; everything finished so far was kept."""

    def __init__(self, done: int, rounds: int) -> None:
        super().__init__(f"time is up after round {done} of {rounds}; nothing is lost")
        self.done, self.rounds = done, rounds


class Budget:
    """Minutes that a command may take.

    Args:
        minutes: None is no limit.

    Raises:
        InputError: if it is not a positive number.
    """

    def __init__(self, minutes: float | None = None) -> None:
        if minutes is not None and not minutes > 0:
            raise InputError(f"max-minutes = {minutes!r}: expected a number above 0")
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def spent(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end
