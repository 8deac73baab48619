"""Hyper-parameters that kept searches found, by task and algorithm.

``tools/tune.py --adopt`` writes them from ``results/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple


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
