"""Directories, read back as plain data: only what is on disk, and nothing is trained.

A report may cover any mixture of directories: runs, studies, comparisons, grids, heterogeneity.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.results.grouping import Study, planned, studies
from fedzmg.results.plans import read_plan
from fedzmg.results.runs import Run, read_run
from fedzmg.storage.formats import RESTORE, read_json

_OF_FIGURES = ("task", "metric", "seeds", "curves")
"""What the figure of a comparison cannot do without."""


class Extra(NamedTuple):
    """A JSON file beside the runs."""

    place: str
    content: Mapping[str, Any]


class Compared(NamedTuple):
    """The curves of a comparison or a study."""

    place: str
    content: Mapping[str, Any]
    """A ``comparison.json``."""
    thresholds: tuple[float, ...]
    """Levels of the study, if it is one."""
    label: str
    """What it says of itself."""


class Plan(NamedTuple):
    """A file that says what was asked for."""

    kind: str
    """``study`` or ``grid``."""
    place: str
    """Its directory as it is shown."""
    path: str
    """The file as the user's own path leads to it."""


class Material(NamedTuple):
    """All that a report is made of."""

    names: tuple[str, ...]
    """What the given directories are called."""
    given: tuple[str, ...]
    """The same as the user wrote them."""
    studies: tuple[Study, ...]
    grids: tuple[Extra, ...]
    heterogeneity: tuple[Extra, ...]
    compared: tuple[Compared, ...]
    plans: tuple[Plan, ...]
    notes: tuple[str, ...]
    """What was left out, and why."""


_HELD = {
    "grid.json": ("task", "metric", "rounds", "algorithms"),
    "heterogeneity.json": ("name", "unit", "clients", "summary"),
}
"""What is in every file of that name."""


def read(places: Sequence[Path]) -> Material:
    """Read every run, grid and heterogeneity file below some directories.

    Args:
        places: run directories, or directories that hold them at any depth.

    Raises:
        InputError: if a place is no directory, holds nothing to report, or holds damaged files.
    """
    runs: list[Run] = []
    found: dict[str, list[Extra]] = {"grid.json": [], "heterogeneity.json": []}
    comparisons: list[Compared] = []
    plans: dict[str, Mapping[str, Any]] = {}
    files: list[Plan] = []
    notes: list[str] = []
    for place in places:
        before = len(runs) + len(notes) + sum(map(len, found.values()))
        if not place.is_dir():
            raise InputError(f"{place} is no directory: give one that holds runs")
        for directory, shown in _walk(place):
            files += [
                Plan(kind, shown, path.as_posix())
                for kind in ("grid", "study")
                if (path := directory / f"{kind}.toml").is_file()
            ]
            plan = read_plan(directory)
            if plan is not None:
                plans[directory.as_posix()] = plan
            if (directory / "spec.toml").is_file():
                run = read_run(directory, shown, notes)
                runs += [] if run is None else [planned(run, plans)]
            for file, extras in found.items():
                if (directory / file).is_file():
                    extras.append(Extra(shown, _whole(directory / file)))
            if (directory / "comparison.json").is_file():
                asked = plans.get(directory.as_posix(), {})
                levels = asked.get("thresholds") or []
                thresholds = tuple(float(level["threshold"]) for level in levels)
                content = read_json(directory / "comparison.json")
                label = str(asked.get("label") or "")
                comparisons.append(Compared(shown, content, thresholds, label))
        if len(runs) + len(notes) + sum(map(len, found.values())) == before:
            raise InputError(
                f"{place} holds no run directory (spec.toml), grid.json or heterogeneity.json: "
                "give a directory that 'fedzmg run', 'compare', 'study', 'grid' or "
                "'data describe' wrote"
            )
    drawn = []
    for one in comparisons:
        lacking = [key for key in _OF_FIGURES if key not in one.content]
        if lacking:
            notes.append(f"{one.place}/comparison.json lacks {lacking[0]!r}: no figure is drawn")
        else:
            drawn.append(one)
    return Material(
        tuple(_name(place) for place in places),
        tuple(place.as_posix() for place in places),
        tuple(studies(runs, [one.content for one in comparisons], plans, notes)),
        tuple(found["grid.json"]),
        tuple(found["heterogeneity.json"]),
        tuple(drawn),
        tuple(files),
        tuple(notes),
    )


def _whole(path: Path) -> dict[str, Any]:
    """What a file of results holds."""
    content = read_json(path)
    lacking = [key for key in _HELD[path.name] if key not in content]
    if lacking:
        raise InputError(f"{path} lacks {lacking[0]!r}: {RESTORE}")
    return content


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
