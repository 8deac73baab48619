"""What a study was to be: of one that is not finished, also what is still to come.

A finished ``study.json`` says all there is. One that is not lists only what has been trained, and
before the first algorithm is through there is none; then ``study.toml`` says what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import read_json, read_toml


def read_plan(directory: Path) -> Mapping[str, Any] | None:
    """What the study in a directory is, as ``study.json`` has it; None if there is no study.

    Raises:
        InputError: if a file is damaged.
    """
    asked, found = directory / "study.toml", directory / "study.json"
    scored = read_json(found) if found.is_file() else None
    if not asked.is_file() or (scored is not None and scored.get("complete", True)):
        return scored
    return {**(scored or {}), **_as_scored(read_toml(asked))}


def _as_scored(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a ``study.toml`` in those of a ``study.json``."""
    listed = asked.get("algorithms", {})
    variants = listed if isinstance(listed, Mapping) else {name: {} for name in listed}
    return {
        "task": asked.get("task"),
        "label": asked.get("label", ""),
        "seeds": asked.get("seeds", []),
        "window": asked.get("window", 4),
        "complete": False,
        "algorithms": {
            variant.get("label") or name: {
                "algorithm": variant.get("algorithm") or name,
                "directory": folder_name(name),
            }
            for name, variant in variants.items()
        },
        "thresholds": [{"threshold": level} for level in asked.get("thresholds", [])],
        "tests": {"family": asked.get("tests", "reference")},
    }
