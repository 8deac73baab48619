"""Train a study: several algorithms over several seeds on identical cohorts and batches.

::

    study.toml                  the plan, written first
    study.json                  scores and tests; rewritten after every pack of runs
    ALGORITHM/seed-SEED/        run directories
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment import training
from fedzmg.experiment.grids.grid import chosen_options
from fedzmg.experiment.plugin_files import say_changed
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.files import NO_GRID, StudySpec
from fedzmg.experiment.specs.run import ResolvedRun, RunSpec
from fedzmg.results.study_result import StudyResult
from fedzmg.simulation import History, packs
from fedzmg.storage.fields import Value
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

RATES = "client.lr", "server.lr"
MOST_RUNS = 16  # largest pack of several algorithms: larger ones are hardly faster and take memory


def run_study(
    spec: StudySpec, out: Path | None, *, task: Task | None = None,
    progress: Progress | None = None, max_minutes: float | None = None, grow: bool = False,
    models: bool = False, remote: Any = None,
) -> StudyResult:  # fmt: skip
    """Train every algorithm under every seed and score them; finished runs are read.

    A directory that holds this study is continued; None stores nothing. With ``grow``, the study
    there may lack some of these algorithms and seeds, which are added, or have more, which are left
    as they are. With ``models``, the histories keep the trained models. ``task`` is a user's own.
    ``remote`` trains the packs in other processes, which need ``out``. Errors are those of
    :func:`~fedzmg.experiment.training.training_loop`, and ``InputError`` for a mistake.
    """
    progress, end = progress or Silent(), training.deadline(max_minutes)
    spec.check(task)
    task, runs = _planned(spec, task or spec.build_task())
    spec.check_participation(task)
    # Every mistake is found before the first round is trained.
    together = _packs(spec, task, runs)
    plan, part = spec.model_dump(exclude_none=True), False
    histories: dict[str, list[History]] = {}
    paths: dict[str, list[Path]] = {name: [] for name in runs}
    with contextlib.ExitStack() as stack:
        if out is not None:
            entered = training.claimed(out, spec, "study.toml", progress.say, grow=grow)
            _, part = stack.enter_context(entered)
            paths = {n: [out / spec.folder(n) / f"seed-{s}" for s in spec.seeds] for n in runs}
            both = {n: list(zip(runs[n], paths[n], strict=True)) for n in runs}
            say_changed([path for n in runs for path in paths[n]], out, progress.say)
        labels: Iterable[str] = together
        if remote is not None and out is not None:
            all_ = {label: [b for n in names for b in both[n]] for label, names in together.items()}
            trained_there = remote.train_study(spec, task, out, all_, progress, end)
            labels, progress = stack.enter_context(contextlib.closing(trained_there)), Silent()
        for label in labels:
            names = together[label]
            found = run_pack(
                task, [run for name in names for run in runs[name]],
                [path for name in names for path in paths[name]], progress=progress,
                stop=training.newly_diverged if spec.stop.diverged else None, end=end, label=label,
                models=models,
            )  # fmt: skip
            for name in names:
                own, found = found[: len(runs[name])], found[len(runs[name]) :]
                # Kept models would fill the device.
                histories[name] = own if models else [replace(h, params=Tree({})) for h in own]
            finished = {spec.shown(n): histories[n] for n in runs if n in histories}
            result = StudyResult.from_histories(finished, plan)
            if out is not None and not part:
                with training.named_write_errors(out):
                    write_json(out / "study.json", result.as_dict())
    return result


def study_packs(spec: StudySpec, task: Task) -> dict[str, list[str]]:
    """Return the algorithms of each pack by its label; those in a pack differ only in numbers."""
    return _packs(spec, *_planned(spec, task))


def _planned(spec: StudySpec, task: Task) -> tuple[Task, dict[str, list[ResolvedRun]]]:
    """Return the task without learning rates that the study does not use, and its runs."""
    rates = find_rates(spec)
    if spec.rates not in ("tuned", "known"):
        task = replace(task, options={})
    runs = {n: study_runs(spec, n, rates.get(n, {})) for n in spec.algorithms}
    return task, {n: [run.resolve(task, n) for run in each] for n, each in runs.items()}


def _packs(spec: StudySpec, task: Task, runs: dict[str, list[ResolvedRun]]) -> dict[str, list[str]]:
    names = list(runs)
    # For deterministic bits, the pack of a run must not depend on the rest of the study.
    size = 1 if spec.deterministic else max(1, MOST_RUNS // len(spec.seeds))
    found = [
        [names[i] for i in members[first : first + size]]
        for members in packs(task, [each[0].trial for each in runs.values()])
        for first in range(0, len(members), size)
    ]
    return {", ".join(p) if len(p) <= 3 else f"{p[0]} and {len(p) - 1} more": p for p in found}


def study_runs(spec: StudySpec, name: str, rates: Mapping[str, Value]) -> list[RunSpec]:
    """Return the runs of an algorithm, one per seed; its own options override the rates found."""
    options = {**rates, **spec.fixed(name)}
    return [spec.run_spec(name, seed, options, eval_every=spec.eval_every) for seed in spec.seeds]


class MissingGrid(InputError):
    """The grid that a study takes its learning rates from is missing or unfinished."""


def find_rates(spec: StudySpec) -> dict[str, dict[str, Value]]:
    """Return the points of the grid that a study names, with fixed options, by algorithm."""
    if spec.rates in NO_GRID:
        return {}
    grid, where = Path(spec.rates), f"rates = {spec.rates!r}"
    first = "run the grid first, or name another with --set rates=DIR"
    if not (grid / "grid.json").is_file():
        raise MissingGrid(f"{where}: not {', '.join(NO_GRID)} or a finished grid: {first}")
    data = read_json(grid / "grid.json", training.REMAKE, training.FORMAT)
    if data["task"] != spec.task:
        raise InputError(f"{where} is a grid for {data['task']!r}, not for {spec.task!r}")
    halves = spec.task in tasks.TASKS and "selection" in tasks.info(spec.task).options()
    if data["selection"] == "test" and halves and spec.preset.get("selection") != "test":
        remedy = 'set preset.selection = "test", or let the half choose'
        raise InputError(f"{where} were chosen by the whole test set: {remedy}")
    by_test = spec.rates_by == "test" and data["selection"] != "test"
    if by_test and not data.get("also_by_test"):
        raise InputError(f'rates_by = "test": run the grid {grid} with also_by_test = true')
    found: dict[str, dict[str, Value]] = {}
    for name in spec.algorithms:
        # By the study's own name for it, else by the algorithm's name.
        entry = data["algorithms"].get(name) or data["algorithms"].get(spec.base(name))
        if entry is None:
            if spec.fixed(name).keys() >= set(RATES):
                continue
            if not data["complete"]:
                raise MissingGrid(f"{where}: the grid is not finished: {first}")
            remedy = f"add it there and run the grid again, or set its {' and '.join(RATES)}"
            raise InputError(f"{name} is not in the grid {grid}: {remedy}")
        if (there := entry["algorithm"]) != (here := spec.base(name)):
            raise InputError(f"{name!r} is {there} in the grid {grid} and {here} here")
        best = entry["best_by_test" if by_test else "best"]
        found[name] = chosen_options(f"{name} in {grid}", entry, best)
    return found
