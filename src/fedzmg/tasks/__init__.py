"""Tasks: data, model, loss and metric that belong together, as presets or brought by a user."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedzmg.errors import unknown
from fedzmg.tasks.convex import Logistic, Quadratic
from fedzmg.tasks.preset import Preset
from fedzmg.tasks.real import Characters, Cifar100, Digits, DigitsPersonal, NextCharacter, Plays
from fedzmg.tasks.task import Protocol, Task

__all__ = ["TASKS", "Preset", "Protocol", "Task", "get", "info"]

_CLASSES = (
    Characters, Cifar100, Digits, DigitsPersonal, Logistic, NextCharacter, Plays, Quadratic
)  # fmt: skip
_BY_NAME = {preset.__name__: preset for preset in _CLASSES}
_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
TASKS = {name: _BY_NAME[fields.pop("preset")](name, **fields) for name, fields in _TABLE.items()}
"""Presets by name."""


def info(name: str) -> Preset:
    """Return the preset of that name, known without its data."""
    if not isinstance(name, str) or name not in TASKS:
        raise unknown("task", str(name), TASKS, "fedzmg list")
    return TASKS[name]


def get(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the preset of that name, with some of its fields changed.

    >>> get("digits").protocol.cohort
    5

    Raises:
        InputError: for an unknown name or field (the nearest is suggested), a wrong value, or
            data that is not here yet.
    """
    return info(name).with_options(options or {}).build()
