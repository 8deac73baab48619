"""Workers of one training as Ray tasks; their messages go through an actor.

Nothing here imports torch: the actor starts at once.
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from fedzmg.cluster.workers import LostWorker, Needs
from fedzmg.errors import InputError

ANSWER_SECONDS = 5.0


class Messages:
    """Actor that keeps messages of workers for the driver, and its wish to stop."""

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


class RayBoard:
    """A worker's connection to the driver."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._answer: Any = None

    def post(self, label: str, message: Any) -> None:
        # A worker that waits in ray.get gives its core to another task; a future waits without.
        self._answer = self.actor.post.remote(label, message).future()

    def stops(self, seconds: float = 0.0) -> bool:
        """Tell whether the driver wants to stop; wait so long for its answer to a message."""
        if self._answer is None or not (seconds or self._answer.done()):
            return False
        ray = importlib.import_module("ray")
        # A message may be lost with its node.
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            return bool(self._answer.result(timeout=seconds))
        return False


def fetch(ray: Any, handles: Any) -> Any:
    """Return the results of work; raise ``LostWorker`` if its worker died."""
    errors = ray.exceptions
    try:
        return ray.get(handles)
    except (errors.RayTaskError, errors.TaskCancelledError) as error:
        if "No module named 'fedzmg'" in str(error):
            remedy = "install the same version on every node"
            raise InputError(f"a worker cannot import fedzmg: {remedy}") from None
        raise
    except errors.RayError as error:
        reason = " ".join(str(error).split())[:200]
        raise LostWorker(f"{type(error).__name__}: {reason}") from None


class RayPool:
    """Like ``ProcessPool``; Ray places work, and ends workers that are left by their driver."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self.board = RayBoard(self._ray.remote(num_cpus=0, max_restarts=-1)(Messages).remote())

    def submit(
        self, function: Callable[..., Any], arguments: Sequence[Any], needs: Needs, memory: float
    ) -> Any:
        return self._cluster.remote(function, needs, memory).remote(*arguments)

    def wait(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        return list(self._ray.wait(list(handles), timeout=seconds)[0])

    def result(self, handle: Any) -> Any:
        return fetch(self._ray, handle)

    def messages(self) -> list[tuple[str, Any]]:
        with contextlib.suppress(self._ray.exceptions.RayError):
            return list(self._ray.get(self.board.actor.take.remote(), timeout=ANSWER_SECONDS))
        return []

    def stop(self) -> None:
        self.board.actor.stop.remote()
