"""Tasks: data, model, loss and metric that belong together, as presets or brought by a user."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedzmg.errors import InputError
from fedzmg.plugins import Registry, load_reference
from fedzmg.tasks.convex import Logistic, Quadratic
from fedzmg.tasks.preset import OwnTask, Preset
from fedzmg.tasks.protocol import Protocol
from fedzmg.tasks.real import Characters, Cifar100, Digits, DigitsPersonal, NextCharacter, Plays
from fedzmg.tasks.task import Task

__all__ = ["TASKS", "OwnTask", "Preset", "Protocol", "Task", "get", "info"]

_CLASSES = (Characters, Cifar100, Digits, DigitsPersonal, Logistic, NextCharacter, Plays, Quadratic)
_BY_NAME = {preset.__name__: preset for preset in _CLASSES}
_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def _entry(value: Any, name: str, _: ModuleType | None) -> tuple[str, Preset]:
    """Make an entry of a preset, a task, or a function without arguments that returns a task."""
    if isinstance(value, Preset):
        return name or value.name, value
    if not isinstance(value, Task) and (not callable(value) or isinstance(value, type)):
        raise InputError(f"{value!r:.80}: expected a Task, or a function () that makes one")
    name = name or str(value.name if isinstance(value, Task) else value.__name__)
    return name, OwnTask(name, value)


_PRESETS = {name: _BY_NAME[own.pop("preset")](name, **own) for name, own in _TABLE.items()}
TASKS: Registry[Preset] = Registry(
    "task", _PRESETS, _entry, lambda a, b: getattr(a, "source", a) is getattr(b, "source", b)
)


def info(name: str) -> Preset:
    """Return the preset of that name, known without its data."""
    return TASKS.look_up(name)


def get(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the preset of that name, with some of its fields changed.

    ``my_task.py:task`` names a task of your own: a :class:`Task` in that file, or a function
    without arguments that returns one.

    >>> get("digits").protocol.cohort
    5
    """
    return info(load_reference(name)).with_options(options or {}).build()
