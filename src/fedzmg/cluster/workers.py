"""Values that drivers and worker processes exchange, on this machine or on a Ray cluster."""

from typing import NamedTuple


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


class RemoteError(NamedTuple):
    """Mistake of a user that a worker found; another exception is a mistake of this program."""

    kind: type[BaseException]
    message: str
    trace: str = ""


class RemoteTraceback(Exception):
    """Traceback of code in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
