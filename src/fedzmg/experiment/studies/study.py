"""Train a study: several algorithms over several seeds on identical cohorts and batches.

::

    study.toml                  the plan, written first
    study.json                  scores and tests; rewritten after every pack of runs
    ALGORITHM/seed-SEED/        run directories

Rounds count from 1: evaluations every five rounds follow the rounds 1, 6, 11, ...
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment.control import Budget
from fedzmg.experiment.early_stopping import Verdict, newly_diverged
from fedzmg.experiment.grids.score import chosen_options
from fedzmg.experiment.plan_directory import FORMAT, REMAKE, claimed
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.rules_hash import say_changed_runs
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import Value
from fedzmg.experiment.specs.study import NO_GRID, StudySpec
from fedzmg.results.study_result import StudyResult
from fedzmg.simulation import History, RoundReport, packs
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

RATES = "client.lr", "server.lr"
MOST_RUNS = 16
"""Largest pack of several algorithms: larger ones are hardly faster and take memory."""


def run_study(
    spec: StudySpec,
    out: Path | None,
    *,
    task: Task | None = None,
    progress: Progress | None = None,
    max_minutes: float | None = None,
    grow: bool = False,
    models: bool = False,
) -> StudyResult:
    """Train every algorithm under every seed and score them; finished runs are read.

    Args:
        spec: the study.
        out: its directory; one that holds this study is continued. None keeps nothing on disk.
        task: a user's own task; by default the preset that the study names.
        progress: shows how far the work is.
        max_minutes: end cleanly after the first round past this time.
        grow: a study in ``out`` may lack some of these algorithms and seeds, which are added, or
            have more, which are left as they are.
        models: keep the trained models in the histories; without, they are only on disk.

    Raises:
        InputError: for a mistake in the study, or a directory that holds something else.
        TimeLimitReached: after ``max_minutes``, with everything finished kept.
        Interrupted: on Ctrl-C, likewise.
    """
    progress, budget = progress or Silent(), Budget(max_minutes)
    spec.check(task)
    task, runs = _planned(spec, task or spec.build_task())
    # Every mistake is found before the first round is trained.
    together = _packs(spec, task, runs)
    plan = spec.model_dump(exclude_none=True)
    histories: dict[str, list[History]] = {}
    kept = None
    if grow and out is not None and (out / "study.toml").is_file():
        kept = StudySpec.read(out / "study.toml")
    part = kept is not None and kept != spec and kept.extends(spec)

    def stop(report: RoundReport) -> Verdict:
        return Verdict(budget.spent, newly_diverged(report) if spec.stop.diverged else {})

    def directory(name: str, run: RunSpec) -> Path:
        assert out is not None
        return out / spec.folder(name) / f"seed-{run.seed}"

    with contextlib.ExitStack() as stack:
        if out is not None:
            whole = kept if part and kept is not None else spec
            stack.enter_context(claimed(out, whole, "study.toml", progress.say, grow=grow))
            planned = [
                (spec.shown(name), run, directory(name, run))
                for name, each in runs.items()
                for run in each
            ]
            say_changed_runs(task, planned, out, progress.say)
        for label, names in together.items():
            each = [(name, run) for name in names for run in runs[name]]
            found = iter(
                run_pack(
                    task,
                    [run for _, run in each],
                    None if out is None else [directory(name, run) for name, run in each],
                    progress=progress,
                    stop=stop,
                    label=label,
                    names=[name for name, _ in each],
                    models=models,
                )
            )
            for name in names:
                own = [next(found) for _ in runs[name]]
                # Kept models would fill the device.
                histories[name] = own if models else [replace(h, params=Tree({})) for h in own]
            finished = {spec.shown(n): histories[n] for n in runs if n in histories}
            result = StudyResult.from_histories(finished, plan)
            if out is not None and not part:
                write_json(out / "study.json", result.as_dict())
    return result


def study_packs(spec: StudySpec, task: Task) -> dict[str, list[str]]:
    """Return the algorithms of each pack by its label; those in a pack differ only in numbers."""
    return _packs(spec, *_planned(spec, task))


def _planned(spec: StudySpec, task: Task) -> tuple[Task, dict[str, list[RunSpec]]]:
    """Return the task without learning rates that the study does not use, and its runs."""
    rates = find_rates(spec)
    if spec.rates not in ("tuned", "known"):
        task = replace(task, options={})
    return task, {n: study_runs(spec, n, rates.get(n, {})) for n in spec.algorithms}


def _packs(
    spec: StudySpec, task: Task, runs: Mapping[str, Sequence[RunSpec]]
) -> dict[str, list[str]]:
    names = list(runs)
    firsts = [specs[0].resolve(task).trial for specs in runs.values()]
    # For deterministic bits, the pack of a run must not depend on the rest of the study.
    size = 1 if spec.deterministic else max(1, MOST_RUNS // len(spec.seeds))
    found = [
        [names[i] for i in members[first : first + size]]
        for members in packs(task, firsts)
        for first in range(0, len(members), size)
    ]
    return {_label(each): each for each in found}


def _label(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def study_runs(spec: StudySpec, name: str, rates: Mapping[str, Value]) -> list[RunSpec]:
    """Return the runs of an algorithm, one per seed; its own options override the rates found."""
    options = {**rates, **spec.fixed(name)}
    return [spec.run_spec(name, seed, options, eval_every=spec.eval_every) for seed in spec.seeds]


def missing_grid(spec: StudySpec) -> str:
    """Say what a study needs before it can find its learning rates; empty if nothing."""
    if spec.rates in NO_GRID:
        return ""
    file, state = Path(spec.rates) / "grid.json", "does not hold a grid yet"
    if file.is_file():
        data = read_json(file, REMAKE, FORMAT)
        known = data["algorithms"]
        if data["complete"] or all(
            n in known or spec.base(n) in known or _has_rates(spec, n) for n in spec.algorithms
        ):
            return ""
        state = "holds a grid that is not finished yet"
    return (
        f"rates = {spec.rates!r}: the directory {state}, and the study will need it: run the grid "
        "first, or name another with --set rates=DIR"
    )


def _has_rates(spec: StudySpec, name: str) -> bool:
    """Return True if an algorithm of a study needs no grid."""
    return spec.fixed(name).keys() >= set(RATES)


def find_rates(spec: StudySpec) -> dict[str, dict[str, Value]]:
    """Return the best points of the grid that a study names, by algorithm; empty if none.

    They include the options that the grid held fixed. An algorithm that is not in the grid may
    bring learning rates of its own.
    """
    if spec.rates in NO_GRID:
        return {}
    grid = Path(spec.rates)
    if not (grid / "grid.json").is_file():
        raise InputError(
            f"rates = {spec.rates!r}: expected tuned, given or the directory of a finished grid, "
            f"and {grid / 'grid.json'} is not there"
        )
    data = read_json(grid / "grid.json", REMAKE, FORMAT)
    if data["task"] != spec.task:
        raise InputError(f"{grid} chose rates for {data['task']!r}, not for {spec.task!r}")
    halves = spec.task in tasks.TASKS and "selection" in tasks.info(spec.task).preset.options()
    if data["selection"] == "test" and halves and spec.preset.get("selection") != "test":
        raise InputError(
            f"the whole test set chose the rates of {grid}, so half of it cannot report as if it "
            'had not: say preset.selection = "test", or let the half choose'
        )
    found: dict[str, dict[str, Value]] = {}
    for name in spec.algorithms:
        # By the study's own name for it, else by the algorithm's name.
        entry = data["algorithms"].get(name) or data["algorithms"].get(spec.base(name))
        if entry is None and _has_rates(spec, name):
            continue
        if entry is None:
            if not data["complete"]:
                raise InputError(f"the grid {grid} is not finished: run it first")
            raise InputError(
                f"{name} is not in the grid {grid}: add it there and run the grid again, or give "
                f"its {' and '.join(RATES)} here"
            )
        if entry["algorithm"] != spec.base(name):
            raise InputError(
                f"{name!r} is {entry['algorithm']} in the grid {grid} and {spec.base(name)} here"
            )
        best = entry["best"]
        if spec.rates_by == "test" and data["selection"] != "test":
            if not data.get("also_by_test"):
                raise InputError(
                    f'rates_by = "test": the grid {grid} was not scored by it; run it with '
                    "also_by_test = true"
                )
            best = entry["best_by_test"]
        found[name] = chosen_options(f"{name} in {grid}", entry, best)
    return found
