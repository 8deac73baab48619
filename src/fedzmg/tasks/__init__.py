"""ON WHAT: data, model, loss and metric that belong together, as presets or brought by a user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedzmg.errors import unknown
from fedzmg.tasks.digits import digits
from fedzmg.tasks.plays import plays
from fedzmg.tasks.task import Protocol, Task

__all__ = ["TASKS", "Entry", "Protocol", "Task", "get"]


@dataclass(frozen=True)
class Entry:
    """One row of the table of presets."""

    build: Callable[[], Task]
    summary: str


TASKS: dict[str, Entry] = {
    "digits": Entry(digits, "8,000 MNIST digits on 160 label-skewed clients, small CNN (embedded)"),
    "plays": Entry(plays, "next character in Shakespeare's plays by role, small GRU (embedded)"),
}


def get(name: str) -> Task:
    """Build the preset of that name.

    Raises:
        InputError: if there is none; the nearest name is suggested.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name].build()
