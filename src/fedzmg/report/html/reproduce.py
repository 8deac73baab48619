"""The last section: commands that repeat everything, versions, machines and data."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.report.html.blocks import Block, Commands, Notes, Pairs, Section, TableBlock
from fedzmg.report.tables.costs import circumstances
from fedzmg.report.tables.table import Cell, Table
from fedzmg.results.formatting import NONE
from fedzmg.results.grouping import Study
from fedzmg.results.reading import Material, PlanFile
from fedzmg.results.runs import Run
from fedzmg.storage.formats import read_json, read_toml
from fedzmg.tasks import TASKS

GRID = "grid.json"
_OWN = (
    "The task {task} was made in Python, so no command trains on it: call "
    "fedzmg.compare(task, ..., out=DIR) in the program that makes it."
)


def section(material: Material) -> Section:
    """Make the section of left-out runs, commands and environment."""
    blocks: list[Block] = [Notes("Left out:", material.notes)] if material.notes else []
    blocks += _commands(material)
    trained: list[str | None] = [study.task for study in material.studies]
    trained += [extra.content.get("task") for extra in material.grids]
    blocks.append(
        Notes(
            "",
            tuple(_OWN.format(task=task) for task in dict.fromkeys(trained) if _is_own(task)),
        )
    )
    for study in material.studies:
        title = "Versions, machine and data"
        if len(material.studies) > 1:
            title = f"{study.name}: versions, machine and data"
        blocks.append(Pairs(title, tuple(circumstances(study.runs)), long=True))
        blocks.append(TableBlock(_directories(study), folded=True))
    return Section("reproduce", "How to reproduce", "", tuple(blocks))


def _commands(material: Material) -> Iterator[Commands]:
    """Return the commands that repeat the runs."""
    runs = [run for study in material.studies for run in study.runs if not _is_own(study.task)]
    # Grids first: studies take their rates from them.
    recorded = [command for plan in material.plans for command in _of_grid(plan)]
    recorded += [run.manifest["command"] for run in runs if run.manifest.get("command")]
    recorded += [
        extra.content["made"]["command"]
        for extra in material.heterogeneity
        if extra.content.get("made", {}).get("command")
    ]
    words = [" ".join(one) if isinstance(one, list) else str(one) for one in recorded]
    # Paths as the user gave them: the commands work in the same directory.
    everything = [
        _line(plan.kind, plan.path, *_rates(plan), "--out", f"reproduced/{plan.shown}")
        for plan in material.plans
        if not _is_own(_planned(plan).get("task"))
    ]
    each = [
        _line("run", f"{run.path}/spec.toml", "--out", f"reproduced/{run.shown}") for run in runs
    ]
    for title, lines in (
        ("Commands as recorded", tuple(dict.fromkeys(words))),
        ("Everything", tuple(everything)),
        ("Each run, with the same settings", tuple(each)),
        ("This page", (_line("report", *material.given, "--out", "reproduced/report"),)),
    ):
        if lines:
            yield Commands(title, lines)


def _of_grid(plan: PlanFile) -> Iterator[str]:
    """Return the commands that made a grid, as recorded by its algorithms."""
    if plan.kind != "grid" or _is_own(_planned(plan).get("task")):
        return
    for path in sorted(Path(plan.path).parent.glob("*/manifest.json")):
        with contextlib.suppress(InputError):  # damaged, but its scores are there
            command = read_json(path).get("command")
            if command:
                yield command


def _is_own(task: str | None) -> bool:
    """Return True for a task that was made in Python: no command can train on it."""
    return task is not None and task not in TASKS


def _rates(plan: PlanFile) -> tuple[str, ...]:
    """Point a kept study to the grid that was kept beside it, if the original is gone.

    ::

        runs/a-grid, runs/a-study       where they were made
        results/a-grid, results/a-study where they are kept
    """
    if plan.kind != "study":
        return ()
    planned = _planned(plan)
    try:
        grid = Path(planned["rates"])
        beside = Path(os.path.normpath(Path(plan.path).parent / ".." / grid.name))
        if (grid / GRID).is_file() or read_json(beside / GRID)["task"] != planned["task"]:
            return ()
    except (InputError, KeyError):  # it names no grid, or there is none
        return ()
    return "--set", f"rates={beside.as_posix()}"


def _planned(plan: PlanFile) -> dict[str, Any]:
    """Read a plan; a damaged one counts as empty because its results are there."""
    try:
        return read_toml(Path(plan.path))
    except InputError:
        return {}


def _line(*words: str) -> str:
    return shlex.join(["fedzmg", *words])


def _directories(study: Study) -> Table:
    rows = [
        [
            Cell(run.shown),
            Cell(_state(run)),
            Cell(str(run.manifest.get("engine", NONE))),
            Cell(f"{run.log.seconds:,.1f}", run.log.seconds),
        ]
        for run in study.runs
    ]
    title = f"{len(rows)} run directories"
    return Table("directories", title, ("directory", "state", "engine", "seconds"), rows, "", [], 3)


def _state(run: Run) -> str:
    if run.diverged is not None:
        end = "" if run.done == run.asked else f", stopped after round {run.done:,}"
        return f"diverged in round {run.diverged:,}{end}"
    if run.complete:
        return f"finished, {run.done:,} rounds"
    return f"round {run.done:,} of {run.asked or '?'}"
