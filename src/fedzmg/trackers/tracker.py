"""What a tracker is: it is told of one run, of every round of it, and of its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fedzmg.storage.files import write_atomic

Ending = Literal["finished", "stopped"]


class TrackedRun(NamedTuple):
    """What a tracker knows of a run before its first round."""

    name: str
    """Tells runs of one directory apart: ``fedzmg/seed-0``."""
    project: str
    """What all of them belong to: the name of that directory."""
    settings: Mapping[str, Any]
    place: Path
    """Where this kind of tracker may write; shared by the runs of the directory."""
    done: int
    """Rounds that are not repeated; what was logged of later ones before is superseded."""


class Tracker(Protocol):
    """Shows one run somewhere; whatever it raises is reported and ends the tracking only."""

    def start(self, run: TrackedRun) -> None:
        """A run begins, or goes on after ``run.done`` rounds."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A round is over; ``step`` is its number, from 1."""
        ...

    def finish(self, ending: Ending) -> None:
        """Nothing more comes; a run that was stopped may go on later."""
        ...


def kept_id(run: TrackedRun, make: Callable[[], str]) -> str:
    """The id under which a run was tracked before; a new one is made and kept."""
    path = run.place / "ids" / f"{run.name.replace('/', '--')}.txt"
    if path.is_file():
        return path.read_text().strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make()
    write_atomic(path, made.encode())
    return made
