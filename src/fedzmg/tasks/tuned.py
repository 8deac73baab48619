"""Hyper-parameters that kept searches found, by task and algorithm.

``tools/tune.py --adopt`` writes them from ``results/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Tuning(NamedTuple):
    """Best point of a search for one algorithm on one task."""

    options: Mapping[str, float]
    source: str
    """File or directory of the search, with every score."""
    remark: str = ""
    """Reason to distrust the point; empty if there is none."""


@cache
def tunings(task: str) -> Mapping[str, Tuning]:
    """Return searches by algorithm name; empty for a task that was never tuned."""
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    return {name: Tuning(**fields) for name, fields in json.loads(text).get(task, {}).items()}


@cache
def tuned(task: str) -> Mapping[str, Mapping[str, float]]:
    """Return tuned options by algorithm name; empty for a task that was never tuned."""
    return {name: found.options for name, found in tunings(task).items()}


def tuning_notes(
    task: str, names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Describe algorithms whose learning rates are untuned or doubtful.

    Args:
        task: name of a preset.
        names: algorithms that will train.
        settings: options that a user set, by algorithm.
    """
    from fedzmg.algorithms import ALGORITHMS

    found = tunings(task)
    # Unknown names are reported elsewhere.
    left = [n for n in names if n in ALGORITHMS and "client.lr" not in settings.get(n, {})]
    untuned = [name for name in left if name not in found]
    notes = [f"{name} on {task}: {found[name].remark}" for name in left
             if name in found and found[name].remark]  # fmt: skip
    if untuned:
        shown = ", ".join(untuned[:3])
        more = f" and {len(untuned) - 3} more" if len(untuned) > 3 else ""
        notes.append(
            f"{shown}{more}: default learning rates, not tuned for {task} ('fedzmg grid' searches)"
        )
    return notes
