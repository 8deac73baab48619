"""Learning rates found for the embedded tasks, by algorithm.

Written by ``tools/tune.py``: a grid on the tuning half of the test data and three seeds that no
reported run uses. Every score is kept under ``results/tuning/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources


@cache
def tuned(task: str) -> Mapping[str, Mapping[str, float]]:
    """Options by algorithm name; empty for a task that was never tuned."""
    text = resources.files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, float]]] = json.loads(text)
    return found.get(task, {})
