"""Directories of results, read back as plain data; nothing is trained.

A report may cover any mixture of directories: runs, studies, grids, heterogeneity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
    """Read every run, grid and heterogeneity file below some directories.

    Args:
        directories: run directories, or directories that hold them at any depth.

    Raises:
        InputError: if a path is not a directory, holds nothing to report, or holds damaged files.
    """
    runs: list[Run] = []
    extras: dict[str, list[Extra]] = {name: [] for name in _REQUIRED}
    plans: dict[str, Mapping[str, Any]] = {}
    files: list[PlanFile] = []
    notes: list[str] = []
    for top in directories:
        if not top.is_dir():
            raise InputError(f"{top} is not a directory; give one that holds runs")
        before = len(runs) + len(notes) + sum(map(len, extras.values()))
        for directory, shown in _walk(top):
            files += [
                PlanFile(kind, shown, path.as_posix())
                for kind in ("grid", "study")
                if (path := directory / f"{kind}.toml").is_file()
            ]
            if (directory / "study.toml").is_file():
                plans[directory.as_posix()] = read_toml(directory / "study.toml")
            if (directory / "spec.toml").is_file():
                run = read_run(directory, shown, notes)
                runs += [] if run is None else [planned(run, plans)]
            for name, found in extras.items():
                if (directory / name).is_file():
                    found.append(Extra(shown, _read_extra(directory / name)))
        if len(runs) + len(notes) + sum(map(len, extras.values())) == before:
            raise InputError(
                f"{top} holds no run directory (spec.toml), grid.json or heterogeneity.json; "
                "give a directory that 'fedzmg run', 'compare', 'study', 'grid' or "
                "'data describe' wrote"
            )
    return Material(
        names=tuple(_name(top) for top in directories),
        given=tuple(top.as_posix() for top in directories),
        studies=tuple(studies(runs, plans, notes)),
        grids=tuple(extras["grid.json"]),
        heterogeneity=tuple(extras["heterogeneity.json"]),
        plans=tuple(files),
        notes=tuple(notes),
    )


def _read_extra(path: Path) -> dict[str, Any]:
    content = read_json(path)
    for key in _REQUIRED[path.name]:
        if key not in content:
            raise InputError(f"{path} lacks {key!r}: {RESTORE}")
    return content


def _walk(top: Path) -> Iterator[tuple[Path, str]]:
    """Yield directories at and below a path in a fixed order, each with its display name."""
    name = _name(top)
    for current, below, _ in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith("."))
        directory = Path(current)
        inner = directory.relative_to(top).as_posix()
        yield directory, name if inner == "." else f"{name}/{inner}"


def _name(top: Path) -> str:
    """Return the name of a directory, also if it is given as ``.``."""
    return top.resolve().name or "root"
