"""Tasks that a user made in Python: commands know them by name only, and cannot make them again."""

from __future__ import annotations

from pathlib import Path

from fedzmg import tasks
from fedzmg.errors import InputError

_CALLS = {"grid.toml": "fedzmg.tune(task, ..., out=DIR)"}
"""How a program goes on with a task of its own, or trains it again, if not by a comparison."""
_TRAINED = {"spec.toml": "", "grid.toml": "*/", "study.toml": "*/*/"}
"""Files of directories that hold results, and the way from there to a manifest."""


def refuse_own_task(task: str, place: Path, remedy: str) -> None:
    """Say what to do with results of a task that only a program has.

    Args:
        task: its name.
        place: the results, for the message.
        remedy: the call that does it in Python.

    Raises:
        InputError: if no preset has this name.
    """
    if task not in tasks.TASKS:
        raise InputError(
            f"{place} is of {task!r}, no task of 'fedzmg list': where it was made in Python "
            f"(Task.from_arrays), call {remedy}"
        )


def refuse_file_of_own_task(path: Path, task: str) -> None:
    """The same for a file that asks for training, if it lies beside what was trained by it.

    Elsewhere a name that nobody knows is a mistake in the file.
    """
    if path.name in _TRAINED and any(path.parent.glob(f"{_TRAINED[path.name]}manifest.json")):
        refuse_own_task(task, path, _CALLS.get(path.name, "fedzmg.compare(task, ..., out=DIR)"))
