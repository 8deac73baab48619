"""Directories of results, read back as plain data; nothing is trained.

A report may cover any mixture of directories: runs, studies, grids, heterogeneity.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.results.grouping import Study, planned, studies
from fedzmg.results.runs import Run, read_run
from fedzmg.storage.formats import RESTORE, read_json, read_toml

_REQUIRED = {
    "grid.json": ("task", "metric", "rounds", "algorithms"),
    "heterogeneity.json": ("name", "unit", "clients", "summary"),
}
"""Keys of every file of that name."""


class Extra(NamedTuple):
    """A JSON file beside the runs."""

    shown: str
    """Its directory for display."""
    content: Mapping[str, Any]


class PlanFile(NamedTuple):
    """The file that a study or a grid was made from."""

    kind: str
    """``study`` or ``grid``."""
    shown: str
    """Its directory for display."""
    path: str
    """The file relative to the working directory."""


class Material(NamedTuple):
    """Everything that a report is made of."""

    names: tuple[str, ...]
    """Names of the given directories."""
    given: tuple[str, ...]
    """The same as the user wrote them."""
    studies: tuple[Study, ...]
    grids: tuple[Extra, ...]
    heterogeneity: tuple[Extra, ...]
    plans: tuple[PlanFile, ...]
    notes: tuple[str, ...]
    """Runs that were left out, and why."""


def read(directories: Sequence[Path]) -> Material:
    """Read every run, grid and heterogeneity file below some directories."""
    runs: list[Run] = []
    extras: dict[str, list[Extra]] = {name: [] for name in _REQUIRED}
    plans: dict[str, Mapping[str, Any]] = {}
    files: list[PlanFile] = []
    notes: list[str] = []
    names = tuple(top.resolve().name or "root" for top in directories)
    for top, name in zip(directories, names, strict=True):
        if not top.is_dir():
            raise InputError(f"{top} is not a directory; give one that holds runs")
        any_here = False
        for current, below, held in os.walk(top):
            below[:] = sorted(name for name in below if not name.startswith("."))
            directory = Path(current)
            shown = (Path(name) / directory.relative_to(top)).as_posix()
            files += [
                PlanFile(kind, shown, (directory / f"{kind}.toml").as_posix())
                for kind in ("grid", "study")
                if f"{kind}.toml" in held
            ]
            if "study.toml" in held:
                plans[directory.as_posix()] = read_toml(directory / "study.toml")
            if "spec.toml" in held:
                run = read_run(directory, shown, notes)
                runs += [] if run is None else [planned(run, plans)]
            for file in _REQUIRED.keys() & set(held):
                content = read_json(directory / file)
                for key in _REQUIRED[file]:
                    if key not in content:
                        raise InputError(f"{directory / file} lacks {key!r}: {RESTORE}")
                extras[file].append(Extra(shown, content))
            any_here |= not {"spec.toml", *_REQUIRED}.isdisjoint(held)
        if not any_here:
            raise InputError(
                f"{top} holds no run directory (spec.toml), grid.json or heterogeneity.json; "
                "give a directory that 'fedzmg run', 'compare', 'study', 'grid' or "
                "'data describe' wrote"
            )
    given, found = tuple(top.as_posix() for top in directories), studies(runs, plans, notes)
    grids, described = (tuple(extras[name]) for name in _REQUIRED)
    return Material(names, given, tuple(found), grids, described, tuple(files), tuple(notes))
