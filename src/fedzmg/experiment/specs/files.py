"""Specification files: reading, JSON Schema, and tasks that only a Python program has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from fedzmg import algorithms, tasks
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.storage.formats import read_toml

Spec: TypeAlias = RunSpec | GridSpec | StudySpec
SPECS: dict[str, type[Spec]] = {"run": RunSpec, "grid": GridSpec, "study": StudySpec}

_RESULTS = {"spec.toml": "manifest.json", "grid.toml": "*/manifest.json"}
_RESULTS |= {"study.toml": "*/*/manifest.json"}
"""Specification files that lie beside results, and the pattern of their manifests."""


def read(path: Path, kind: str | None = None) -> Spec:
    """Read a run, a grid or a study, as the file's ``kind`` says; ``kind`` requires one."""
    values = read_toml(path)
    found = values.get("kind", kind or "run")
    if "kind" not in values and found == "run" and "algorithms" in values:
        raise InputError(
            f'{path}: kind is missing: add kind = "grid" or kind = "study" at its top, or name one '
            "algorithm = NAME for a run"
        )
    if not isinstance(found, str) or found not in SPECS:
        raise InputError(f"{path}: {unknown('kind', str(found), SPECS)}")
    if kind is not None and found != kind:
        raise InputError(f"{path} is a {found}: use 'fedzmg {found} {path}'")
    if found == "run":
        values.pop("kind", None)
    try:
        spec = SPECS[found].parse(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    # Beside results, an unknown task was made in Python; elsewhere it is a mistake in the file.
    if path.name in _RESULTS and any(path.parent.glob(_RESULTS[path.name])):
        call = "tune" if path.name == "grid.toml" else "compare"
        refuse_own_task(spec.task, path, f"fedzmg.{call}(task, ..., out=DIR)")
    return spec


def refuse_own_task(task: str, path: Path, remedy: str) -> None:
    """Refuse results of a task that only a Python program builds; ``remedy`` is its call."""
    if task not in tasks.TASKS:
        raise InputError(
            f"{path} is of {task!r}, which is not a task of 'fedzmg list': for a task made in "
            f"Python (Task.from_arrays), call {remedy}"
        )


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a file with all known names, for editors."""
    if kind not in SPECS:
        raise unknown("kind", kind, SPECS)
    found = SPECS[kind].model_json_schema()
    properties = found["properties"]
    properties["task"]["enum"] = list(tasks.TASKS)
    names = {"type": "string", "enum": list(algorithms.ALGORITHMS)}
    if kind == "run":
        properties["algorithm"]["enum"] = names["enum"]
    else:
        listed = {"type": "array", "items": names, "minItems": 1, "uniqueItems": True}
        table = properties["algorithms"]
        description = table.pop("description")
        properties["algorithms"] = {"description": description, "anyOf": [listed, table]}
        found["$defs"]["Variant"]["properties"]["algorithm"]["anyOf"][0] = names
    if kind == "grid":
        description = properties["axes"]["description"]
        properties["axes"] = {"description": description, "type": "object"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
