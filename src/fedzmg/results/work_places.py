"""Where work is done: studies, grids, comparisons and runs below a directory, by their files.

A study and a grid begin with a file that says what is to be done. A comparison has none until its
end: it is known by its runs, ``ALGORITHM/seed-SEED`` each, on one task by one protocol.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedzmg.algorithms import ALGORITHMS
from fedzmg.errors import InputError
from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import read_json, read_toml
from fedzmg.storage.lock import NAME as LOCK
from fedzmg.storage.lock import Owner, read_owner

Kind = Literal["run", "study", "grid", "comparison", "starting"]

PLANS: dict[str, Kind] = {"study.toml": "study", "grid.toml": "grid", "spec.toml": "run"}
USUALLY_COMPARED = "fedzmg,fedavg,fedadam"
"""By ``fedzmg compare`` without ``--algorithms``."""


class Place(NamedTuple):
    """A directory in which something is done."""

    directory: Path
    kind: Kind
    runs: tuple[Path, ...] = ()
    """Of a comparison: those that have begun."""


def places(top: Path) -> list[Place]:
    """Studies, grids, comparisons and runs at or below a directory, in order.

    Raises:
        InputError: if the file that makes a run one is damaged.
    """
    found: list[Place] = []
    members: dict[str, list[Path]] = {}
    for current, below, files in os.walk(top):
        below[:] = sorted(name for name in below if not name.startswith("."))
        name = next((name for name in PLANS if name in files), None)
        if name is None:
            continue
        below.clear()
        directory, kind = Path(current), PLANS[name]
        compared = None if kind != "run" or directory == top else _compared(directory, top)
        if compared is None:
            found.append(Place(directory, kind))
            continue
        around, alike = compared
        if alike not in members:
            members[alike] = []
            found.append(Place(around, "comparison", (directory,)))
        members[alike].append(directory)
    whole = {tuple(runs[:1]): tuple(runs) for runs in members.values()}
    return [place._replace(runs=whole.get(place.runs, ())) for place in found]


def _compared(run: Path, top: Path) -> tuple[Path, str] | None:
    """The directory of the comparison that a run is part of, and what all runs of it share."""
    spec = read_toml(run / "spec.toml")
    algorithm = folder_name(str(spec.get("algorithm")))
    if (run.parent.resolve().name, run.name) != (algorithm, f"seed-{spec.get('seed')}"):
        return None
    around = run.parent if run.parent == top else run.parent.parent
    shared = {key: spec.get(key) for key in ("task", "preset", "protocol")}
    return around, json.dumps([str(around), shared], sort_keys=True, default=str)


def asked_by(comparison: Place) -> list[str]:
    """The algorithms that commands were to compare, in their order."""
    runs = [run for run in comparison.runs if run.parent != comparison.directory]
    found = [json_or_nothing(run / "manifest.json").get("command") for run in runs]
    commands = dict.fromkeys(str(command) for command in found if command)
    return list(dict.fromkeys(name for one in commands for name in asked_algorithms(one)))


def asked_algorithms(command: str) -> list[str]:
    """What a command compares, in its order; nothing if it is no such command.

    >>> asked_algorithms("fedzmg compare digits --algorithms fedavg,fedprox --seeds 2")
    ['fedavg', 'fedprox']
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    if "compare" not in words[:2]:
        return []
    names = USUALLY_COMPARED
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--algorithms":
            names = following
        elif word.startswith("--algorithms="):
            names = word.partition("=")[2]
    listed = [name.strip() for name in names.split(",") if name.strip()]
    return list(ALGORITHMS) if listed == ["all"] else listed


def manifests(place: Place) -> Iterator[Path]:
    """Of the runs or algorithms there, those that exist."""
    if place.runs:
        yield from (run / "manifest.json" for run in place.runs)
        return
    depth = {"run": "", "grid": "*/", "study": "*/*/"}[place.kind]
    yield from sorted(place.directory.glob(f"{depth}manifest.json"))


def owner_of(place: Place) -> Owner | None:
    """Who holds a place; a run may be held as part of a study only, a comparison by its runs."""
    whole = place.directory.resolve()
    holders = [whole, *whole.parents[:2]] if place.kind == "run" else [whole, *place.runs]
    found = list(filter(None, map(read_owner, holders)))
    return next((owner for owner in found if not owner.is_gone), found[0] if found else None)


def is_alive(directory: Path) -> bool:
    """Whether a process is at work there."""
    if not (directory / LOCK).exists():
        return False
    owner = read_owner(directory)
    return owner is not None and not owner.is_gone


def json_or_nothing(path: Path) -> dict[str, Any]:
    """A file that may be missing, or be about to be replaced."""
    try:
        return read_json(path)
    except InputError:
        return {}
