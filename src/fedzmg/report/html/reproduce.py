"""The last section: commands that repeat everything, versions, machines and data."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.report.html.blocks import Block, Section, table_block
from fedzmg.report.tables.study import circumstances
from fedzmg.report.tables.table import Column, Table
from fedzmg.results.formatting import NONE
from fedzmg.results.reading import Material, PlanFile
from fedzmg.results.runs import Run
from fedzmg.storage.formats import read_json, read_toml
from fedzmg.tasks import TASKS

GRID = "grid.json"
_DIRECTORY_COLUMNS = (
    Column("directory", "", "shown"),
    Column("state", "", lambda run: _state(run)),
    Column("engine", "", lambda run: str(run.manifest.get("engine", NONE))),
    Column("seconds", "", "log.seconds", "{:,.1f}".format),
)


def section(material: Material) -> Section:
    """Make the section of left-out runs, commands and environment."""
    blocks = [Block("notes", material.notes, "Left out"), *_commands(material)]
    trained: list[Any] = [study.task for study in material.studies]
    trained += [extra.content.get("task") for extra in material.grids]
    notes = [
        f"The task {task} was made in Python, so no command trains on it: call "
        "fedzmg.compare(task, ..., out=DIR) in the program that makes it."
        for task in dict.fromkeys(trained)
        if _is_own(task)
    ]
    blocks.append(Block("notes", notes))
    for study in material.studies:
        which = f" of {study.name}" if len(material.studies) > 1 else ""
        table = Table.build("", "", _DIRECTORY_COLUMNS, study.runs, words=3)
        blocks += [
            Block("pairs", circumstances(study.runs), f"Versions, machine and data{which}", "long"),
            table_block(table, f"{len(study.runs)} run directories", folded=True),
        ]
    return Section("reproduce", "How to reproduce", "", blocks)


def _commands(material: Material) -> Iterator[Block]:
    """Yield the commands that repeat the runs."""
    runs = [run for study in material.studies for run in study.runs if not _is_own(study.task)]
    plans = {plan: _read(plan) for plan in material.plans}
    plans = {plan: planned for plan, planned in plans.items() if not _is_own(planned.get("task"))}
    # Grids first: studies take their rates from them.
    recorded: list[Any] = [
        command for plan in plans if plan.kind == "grid" for command in _of_grid(plan)
    ]
    recorded += [run.manifest.get("command") for run in runs]
    recorded += [extra.content.get("made", {}).get("command") for extra in material.heterogeneity]
    words = [" ".join(one) if isinstance(one, list) else str(one) for one in recorded if one]
    # Paths as the user gave them: the commands work in the same directory.
    everything = [
        _line(plan.kind, plan.path, *_rates(plan, planned), "--out", f"reproduced/{plan.shown}")
        for plan, planned in plans.items()
    ]
    each = [
        _line("run", f"{run.path}/spec.toml", "--out", f"reproduced/{run.shown}") for run in runs
    ]
    for title, lines in (
        ("Commands as recorded", list(dict.fromkeys(words))),
        ("Everything", everything),
        ("Each run, with the same settings", each),
        ("This page", [_line("report", *material.given, "--out", "reproduced/report")]),
    ):
        many = len(lines) > 6
        yield Block("commands", lines, title + f" ({len(lines)} commands)" * many, folded=many)


def _of_grid(plan: PlanFile) -> Iterator[Any]:
    """Yield the commands that made a grid, as recorded by its algorithms."""
    for path in sorted(Path(plan.path).parent.glob("*/manifest.json")):
        with contextlib.suppress(InputError):  # damaged, but its scores are there
            yield read_json(path).get("command")


def _is_own(task: str | None) -> bool:
    """Return True for a task that was made in Python: no command can train on it."""
    return task is not None and task not in TASKS


def _rates(plan: PlanFile, planned: dict[str, Any]) -> tuple[str, ...]:
    """Point a kept study to the grid that was kept beside it, if the original is gone.

    ::

        runs/a-grid, runs/a-study       where they were made
        results/a-grid, results/a-study where they are kept
    """
    if plan.kind == "study" and "rates" in planned and "task" in planned:
        grid = Path(planned["rates"])
        beside = Path(os.path.normpath(Path(plan.path).parent / ".." / grid.name))
        with contextlib.suppress(InputError):  # there is none
            same = read_json(beside / GRID).get("task") == planned["task"]
            if same and not (grid / GRID).is_file():
                return "--set", f"rates={beside.as_posix()}"
    return ()


def _read(plan: PlanFile) -> dict[str, Any]:
    """Read a plan; a damaged one counts as empty because its results are there."""
    try:
        return read_toml(Path(plan.path))
    except InputError:
        return {}


def _line(*words: str) -> str:
    return shlex.join(["fedzmg", *words])


def _state(run: Run) -> str:
    if run.diverged is not None:
        end = "" if run.done == run.asked else f", stopped after round {run.done:,}"
        return f"diverged in round {run.diverged:,}{end}"
    if run.complete:
        return f"finished, {run.done:,} rounds"
    return f"round {run.done:,} of {run.asked or '?'}"
