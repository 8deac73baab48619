"""Ctrl-C during a round."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self

from fedzmg.experiment.work.progress import Progress


class DeferredInterrupt:
    """Holds Ctrl-C back until the round is over, so that nothing is ever kept by halves.

    A second Ctrl-C stops at once; the run then goes on from its last checkpoint.
    """

    def __init__(self, progress: Progress) -> None:
        self.asked = False
        self._progress = progress
        self._before: Any = None

    def __enter__(self) -> Self:
        # Only the main thread gets signals; elsewhere there is nothing to hold.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: Any) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._progress.say("stopping after this round; press Ctrl-C again to stop at once")

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
