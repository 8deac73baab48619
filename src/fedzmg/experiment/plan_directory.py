"""Directories of grids and studies, each of which holds one plan and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fedzmg.errors import InputError
from fedzmg.experiment.specs.files import StudySpec
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.training import named_write_errors
from fedzmg.storage import lock
from fedzmg.storage.files import write_atomic
from fedzmg.storage.formats import flat, log_lines
from fedzmg.storage.lock import Hold, hold

FORMAT = 1
"""Format of ``grid.json``, ``scores.json`` and ``study.json``."""
ANOTHER = "choose another directory with --out"
REMAKE = "remove it to make it again"


@contextlib.contextmanager
def claimed(
    out: Path, spec: Plan, name: str, say: Callable[[str], None], *, grow: bool = False
) -> Iterator[tuple[Hold, bool]]:
    """Lock a directory and write its plan ``name``, or check that it holds the same plan.

    With ``grow``, a study that extends the one there replaces it. Yield the lock, and True for a
    study that is only a part of the one there.
    """
    with hold([out], say) as held:
        path, part = out / name, False
        kept = type(spec).read(path) if path.is_file() else None
        if kept is None and any(p.name not in (lock.NAME, lock.GUARD) for p in out.iterdir()):
            raise InputError(f"{out} is not empty and holds no {name}: {ANOTHER}")
        difference = "" if kept is None else _difference(kept, spec)
        if difference and grow and isinstance(spec, StudySpec) and isinstance(kept, StudySpec):
            part = kept != spec and kept.extends(spec)
            difference = "" if part or spec.extends(kept) else difference
            kept = kept if part else None
        if difference:
            raise InputError(f"{out} holds another {path.stem} ({difference}): {ANOTHER}")
        if kept is None:
            with named_write_errors(out):
                write_atomic(path, spec.to_toml().encode())
        yield held, part


def _difference(kept: Plan, asked: Plan) -> str:
    if kept != asked:
        values = (plan.model_dump(exclude_none=True) for plan in (kept, asked))
        # An algorithm without settings of its own is an empty table, but it counts.
        return first_difference(*(flat(one, keep_empty=True) for one in values))
    there, here = kept.orders(), asked.orders()
    return "" if there == here else first_difference(there, here)


def first_difference(there: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Describe the first setting, by dotted name, in which two specifications differ."""
    key = next(k for k in [*here, *there] if there.get(k) != here.get(k))
    return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"


Rows: TypeAlias = dict[tuple[int, int], dict[str, Any]]
"""Lines of a grid's log by trial and round."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a grid's log in the order of writing."""
    return log_lines(path, _parsed, f"restore it, or remove {path.parent} to start again")


def read_rows(path: Path) -> Rows:
    """Read a grid's log by trial and round; a later line supersedes an earlier one."""
    return {(line["trial"], line["round"]): line for line in read_lines(path)}


def _parsed(values: dict[str, Any]) -> dict[str, Any]:
    int(values["trial"]), int(values["round"])
    return {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in values.items()}
