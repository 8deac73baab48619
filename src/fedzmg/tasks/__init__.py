"""Tasks: data, model, loss and metric that belong together, as presets or brought by a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedzmg.errors import unknown
from fedzmg.tasks.convex import Logistic, Quadratic
from fedzmg.tasks.preset import Preset
from fedzmg.tasks.real import Characters, Cifar100, Digits, NextCharacter, Plays
from fedzmg.tasks.task import Protocol, Task

__all__ = ["TASKS", "Preset", "Protocol", "Task", "get", "info"]

_SUMMARIES = {
    "digits": "8,000 MNIST digits on 160 label-skewed clients, small CNN (embedded)",
    "plays": "next character in Shakespeare's plays by role, small GRU (embedded)",
    "emnist62": "EMNIST by writer, digits and letters, the paper's CNN",
    "emnist10": "EMNIST by writer, digits only, the paper's CNN with ten outputs",
    "emnist10-head62": "EMNIST digits, 62 outputs: most likely what the paper's table shows",
    "cifar100": "CIFAR-100 on 500 clients by Pachinko allocation, the paper's CNN",
    "shakespeare": "next character in TFF's Shakespeare by role, the paper's GRU",
    "mnist-by-writer": "MNIST by NIST's writers, 62 outputs: stand-in for emnist10-head62",
    "chars74k": "Chars74K, hand-drawn digits and letters by writer: stand-in for emnist62",
    "shakespeare-by-role": "next character, another edition of the plays: stand-in for shakespeare",
    "quadratic": "least squares on 8 unlike clients, optimum known (generated)",
    "logistic": "logistic regression with l2 on 6 unlike clients, optimum known (generated)",
}
_PRESETS = (
    Digits("digits", 160),
    Plays("plays", 875),
    Characters("emnist62", 3400, "emnist62"),
    Characters("emnist10", 3383, "emnist10", outputs=10),
    Characters("emnist10-head62", 3383, "emnist10"),
    Cifar100("cifar100", 500),
    NextCharacter("shakespeare", 715, "shakespeare"),
    Characters("mnist-by-writer", 834, "mnist-by-writer"),
    Characters("chars74k", 55, "chars74k"),
    NextCharacter("shakespeare-by-role", 715, "shakespeare-by-role"),
    Quadratic("quadratic", 8),
    Logistic("logistic", 6, l2=0.05),
)
TASKS = {p.name: replace(p, summary=_SUMMARIES[p.name]) for p in _PRESETS}
"""Presets by name. Stand-ins are other real data in the layout of the paper's data sets."""


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
