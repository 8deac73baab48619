"""Directories, read back as plain data: only what is on disk, and nothing is trained.

A report may cover any mixture of directories: runs, studies, comparisons, grids, heterogeneity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.report.results.grouping import Study, planned, studies
from fedzmg.report.results.runs import Run, read_run
from fedzmg.report.results.stored import read_json


class Extra(NamedTuple):
    """A JSON file beside the runs."""

    place: str
    content: Mapping[str, Any]


class Material(NamedTuple):
    """All that a report is made of."""

    names: tuple[str, ...]
    """The given directories."""
    studies: tuple[Study, ...]
    grids: tuple[Extra, ...]
    heterogeneity: tuple[Extra, ...]
    plans: tuple[str, ...]
    """Files that say what was asked for: ``PLACE/study.toml``, ``PLACE/grid.toml``."""
    notes: tuple[str, ...]
    """What was left out, and why."""


def read(places: Sequence[Path]) -> Material:
    """Read every run, grid and heterogeneity file below some directories.

    Args:
        places: run directories, or directories that hold them at any depth.

    Raises:
        InputError: if a place is no directory, holds nothing to report, or holds damaged files.
    """
    runs: list[Run] = []
    found: dict[str, list[Extra]] = {"grid.json": [], "heterogeneity.json": []}
    comparisons: list[Mapping[str, Any]] = []
    plans: dict[str, Mapping[str, Any]] = {}
    files: list[str] = []
    notes: list[str] = []
    for place in places:
        before = len(runs) + len(notes) + sum(map(len, found.values()))
        if not place.is_dir():
            raise InputError(f"{place} is no directory: give one that holds runs")
        for directory, shown in _walk(place):
            files += [
                f"{shown}/{kind}.toml"
                for kind in ("grid", "study")
                if (directory / f"{kind}.toml").is_file()
            ]
            if (directory / "study.json").is_file():
                plans[shown] = read_json(directory / "study.json")
            if (directory / "spec.toml").is_file():
                run = read_run(directory, shown, notes)
                runs += [] if run is None else [planned(run, plans)]
            for file, extras in found.items():
                if (directory / file).is_file():
                    extras.append(Extra(shown, read_json(directory / file)))
            if (directory / "comparison.json").is_file():
                comparisons.append(read_json(directory / "comparison.json"))
        if len(runs) + len(notes) + sum(map(len, found.values())) == before:
            raise InputError(
                f"{place} holds no run directory (spec.toml), grid.json or heterogeneity.json: "
                "give a directory that 'fedzmg run', 'compare' or 'study' wrote"
            )
    return Material(
        tuple(_name(place) for place in places),
        tuple(studies(runs, comparisons, plans, notes)),
        tuple(found["grid.json"]),
        tuple(found["heterogeneity.json"]),
        tuple(files),
        tuple(notes),
    )


def _walk(place: Path) -> Iterator[tuple[Path, str]]:
    """Directories at and below a place in a fixed order, each with the name it is shown under."""
    top = _name(place)
    for current, below, _ in os.walk(place):
        below[:] = sorted(name for name in below if not name.startswith("."))
        directory = Path(current)
        rest = directory.relative_to(place).as_posix()
        yield directory, top if rest == "." else f"{top}/{rest}"


def _name(place: Path) -> str:
    """What a directory is called, also where it is given as ``.``."""
    return place.resolve().name or "root"
