"""The interface of worker processes, on this machine or on a Ray cluster."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol


class Needs(NamedTuple):
    """Resources of one worker process; it owns its GPU, or its part of one."""

    cpus: float
    gpus: float = 0.0

    def fit(self, resources: dict[str, float]) -> int:
        """Count the workers that a node has room for."""
        wanted = [("CPU", self.cpus), ("GPU", self.gpus)]
        return int(min(resources.get(name, 0.0) / need for name, need in wanted if need))


class LostWorker(Exception):
    """A worker that died; its work continues from the last checkpoint."""


class RemoteTraceback(Exception):
    """Traceback of code in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Board(Protocol):
    """A worker's connection to the driver."""

    def post(self, label: str, message: Any) -> None:
        """Send a message, if there is one; do not wait for the answer."""

    def stops(self, seconds: float = 0.0) -> bool:
        """Tell whether the driver wants to stop; wait so long for its answer to a message."""


class Pool(Protocol):
    """Workers of one training. Handles name submitted work."""

    @property
    def board(self) -> Board | None:
        """Connection to send with the work; None: each worker gets its own."""

    def submit(
        self, function: Callable[..., Any], arguments: Sequence[Any], needs: Needs, memory: float
    ) -> Any:
        """Let a worker call a function; return a handle."""

    def wait(self, handles: Sequence[Any], seconds: float) -> list[Any]:
        """Wait for the first of them to end; return those that have ended."""

    def result(self, handle: Any) -> Any:
        """Return the result of work that has ended; raise ``LostWorker`` if its worker died."""

    def messages(self) -> list[tuple[str, Any]]:
        """Return the messages of workers since the last call, with their labels."""

    def stop(self) -> None:
        """Ask all workers to stop after their rounds."""


class Cluster(Protocol):
    """Worker processes that can be started."""

    on: str  # as the user named it
    threads: int  # of each worker: they decide the last bits

    def needs(self, device: str) -> Needs:
        """Return the resources of a worker for a device of a specification."""

    def workers(self, needs: Needs) -> int:
        """Count the workers that train at the same time."""

    def pool(self) -> AbstractContextManager[Pool]:
        """Start the workers of a training, and end them afterwards."""
