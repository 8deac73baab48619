"""The files of runs, grids and studies: how one is read, and the JSON Schema of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from fedzmg import algorithms, tasks
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.own import refuse_file_of_own_task
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.storage.formats import read_toml

Spec: TypeAlias = RunSpec | GridSpec | StudySpec
SPECS: dict[str, type[Spec]] = {"run": RunSpec, "grid": GridSpec, "study": StudySpec}


def read(path: Path, kind: str | None = None) -> Spec:
    """Read a run, a grid or a study; the file's ``kind`` says which, a run needs none.

    Args:
        path: a TOML file.
        kind: what it has to be; None: anything.

    Raises:
        InputError: if it is something else or not valid.
    """
    values = read_toml(path)
    said = values.get("kind", kind or "run")
    if "kind" not in values and said == "run" and "algorithms" in values:
        raise InputError(
            f'{path}: kind is missing: say kind = "grid" or kind = "study" at its top, or name one '
            "algorithm = NAME for a run"
        )
    if not isinstance(said, str) or said not in SPECS:
        raise InputError(f"{path}: {unknown('kind', str(said), SPECS)}")
    if kind is not None and said != kind:
        raise InputError(f"{path} is a {said}: use 'fedzmg {said} {path}'")
    if said == "run":
        values.pop("kind", None)
    try:
        found = SPECS[said].parse(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    refuse_file_of_own_task(path, found.task)
    return found


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a file, with the names there are, for editors.

    Raises:
        InputError: for an unknown kind.
    """
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
        properties["axes"] = {
            "description": properties["axes"]["description"],
            "type": "object",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
