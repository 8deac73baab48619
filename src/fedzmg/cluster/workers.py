"""Values that drivers and worker processes exchange, on this machine or on a Ray cluster."""

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
