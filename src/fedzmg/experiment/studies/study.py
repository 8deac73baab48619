"""Compare algorithms over seeds: a directory of run directories, and every score of them.

::

    study.toml                  what was asked for
    study.json                  scores and tests; rewritten after every pack of runs
    ALGORITHM/seed-SEED/        run directories

Rounds count from 1. Scores speak of round indices, as the paper does: index ``r`` is the state
after round ``r + 1``, so evaluations every five rounds have the indices 0, 5, 10, ...
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from fedzmg import tasks
from fedzmg.errors import InputError
from fedzmg.experiment.control import Budget
from fedzmg.experiment.early_stopping import asking
from fedzmg.experiment.grids.score import handed_on
from fedzmg.experiment.plan_directory import FORMAT, claimed, read_json
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.rules_hash import PlannedRun, say_changed_runs
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.specs.strict import Value
from fedzmg.experiment.specs.study import StudySpec
from fedzmg.experiment.studies.compare import Comparison
from fedzmg.results import scores
from fedzmg.results.curves import curve, final, stopped, whole
from fedzmg.results.scores import FinalRule, ThresholdRule
from fedzmg.results.significance import family
from fedzmg.simulation import History, packs
from fedzmg.storage.formats import write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import Tree

RATES = "client.lr", "server.lr"
MOST_RUNS = 16
"""Of several algorithms in one pack: more hardly train faster side by side, and take memory."""
RULES: tuple[ThresholdRule, ...] = get_args(ThresholdRule)
FINAL_RULES: tuple[FinalRule, ...] = get_args(FinalRule)


def run_study(
    spec: StudySpec,
    out: Path,
    *,
    task: Task | None = None,
    progress: Progress | None = None,
    max_minutes: float | None = None,
) -> tuple[dict[str, Any], Comparison]:
    """Train every algorithm under every seed and score them; what is finished is read.

    Args:
        spec: the study.
        out: its directory; one that holds this study is continued.
        task: a user's own task; by default the preset that the study names.
        progress: what shows how far the work is.
        max_minutes: end cleanly after the first round past this time.

    Returns:
        What ``study.json`` holds, and the curves as a comparison.

    Raises:
        InputError: for a mistake in the study, or a directory that holds something else.
        TimeLimitReached: when ``max_minutes`` are over, with everything finished kept.
        Interrupted: on Ctrl-C, likewise.
    """
    progress, budget = progress or Silent(), Budget(max_minutes)
    spec.check(task)
    task, runs = _planned(spec, task or spec.build_task())
    # Every mistake is found before the first round is trained.
    together = _packs(spec, task, runs)
    stop = asking(budget, diverged=spec.stop.diverged)
    histories: dict[str, list[History]] = {}
    finished: dict[str, list[History]] = {}
    data: dict[str, Any] = {}
    with claimed(out, spec, "study.toml", progress.say):
        planned = [
            PlannedRun(spec.shown(name), run, out / spec.folder(name) / f"seed-{run.seed}")
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
                    [out / spec.folder(name) / f"seed-{run.seed}" for name, run in each],
                    progress=progress,
                    stop=stop,
                    label=label,
                    names=[name for name, _ in each],
                    models=False,
                )
            )
            for name in names:
                # Models are in the run directories; here they would fill the device.
                histories[name] = [replace(next(found), params=Tree({})) for _ in runs[name]]
            finished = {spec.shown(n): histories[n] for n in runs if n in histories}
            data = summary(spec, task, finished, runs)
            write_json(out / "study.json", data)
    return data, Comparison(task, finished)


def study_packs(spec: StudySpec, task: Task) -> dict[str, list[str]]:
    """Names of algorithms that differ in numbers only and train side by side, by label.

    Raises:
        InputError: for a mistake in the study.
    """
    return _packs(spec, *_planned(spec, task))


def _planned(spec: StudySpec, task: Task) -> tuple[Task, dict[str, list[RunSpec]]]:
    """The task without rates that the study does not use, and its runs by algorithm."""
    rates = find_rates(spec)
    if spec.rates != "tuned":
        task = replace(task, options={})
    return task, {n: study_runs(spec, n, rates.get(n, {})) for n in spec.algorithms}


def _packs(
    spec: StudySpec, task: Task, runs: Mapping[str, Sequence[RunSpec]]
) -> dict[str, list[str]]:
    names = list(runs)
    firsts = [specs[0].resolve(task).trial for specs in runs.values()]
    # Where bits are promised, what trains beside a run must not depend on the rest of the study.
    size = 1 if spec.deterministic else max(1, MOST_RUNS // len(spec.seeds))
    found = [
        [names[i] for i in places[first : first + size]]
        for places in packs(task, firsts)
        for first in range(0, len(places), size)
    ]
    return {_label(each): each for each in found}


def _label(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def study_runs(spec: StudySpec, name: str, rates: Mapping[str, Value]) -> list[RunSpec]:
    """The runs of an algorithm, one per seed; its own options go before the rates found."""
    options = {**rates, **spec.fixed(name)}
    found = options.pop("weights", None)
    weights = spec.algorithms[name].weights or found
    runs = [spec.run_spec(name, seed, options, eval_every=spec.eval_every) for seed in spec.seeds]
    return [run.model_copy(update={"weights": weights}) for run in runs]


def missing_grid(spec: StudySpec) -> str:
    """What is to be done before a study can find its rates; empty if nothing is."""
    if spec.rates in ("tuned", "given"):
        return ""
    file, state = Path(spec.rates) / "grid.json", "does not hold a grid yet"
    if file.is_file():
        data = read_json(file)
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
    """Whether an algorithm of a study needs no grid."""
    return spec.fixed(name).keys() >= set(RATES)


def find_rates(spec: StudySpec) -> dict[str, dict[str, Value]]:
    """The best points of the grid that a study names, by algorithm; empty if it names none.

    With them comes whatever the grid held fixed, how clients weigh included. An algorithm that the
    grid does not know may bring rates of its own.

    Raises:
        InputError: if the grid is of another task, not finished, lacks an algorithm, or was
            scored by examples that this study would report on as if they were new.
    """
    if spec.rates in ("tuned", "given"):
        return {}
    place = Path(spec.rates)
    if not (place / "grid.json").is_file():
        raise InputError(
            f"rates = {spec.rates!r}: expected tuned, given or the directory of a finished grid, "
            f"and {place / 'grid.json'} is not there"
        )
    data = read_json(place / "grid.json")
    if data["task"] != spec.task:
        raise InputError(f"{place} chose rates for {data['task']!r}, not for {spec.task!r}")
    halves = spec.task in tasks.TASKS and "selection" in tasks.info(spec.task).preset.options()
    if data["selection"] == "test" and halves and spec.preset.get("selection") != "test":
        raise InputError(
            f"the whole test set chose the rates of {place}, so half of it cannot report as if it "
            'had not: say preset.selection = "test", or let the half choose'
        )
    found: dict[str, dict[str, Value]] = {}
    for name in spec.algorithms:
        # By the study's own name for it, else by the algorithm's.
        entry = data["algorithms"].get(name) or data["algorithms"].get(spec.base(name))
        if entry is None and _has_rates(spec, name):
            continue
        if entry is None:
            if not data["complete"]:
                raise InputError(f"the grid {place} is not finished: run it first")
            raise InputError(
                f"{name} is not in the grid {place}: add it there and run the grid again, or give "
                f"its {' and '.join(RATES)} here"
            )
        if entry["algorithm"] != spec.base(name):
            raise InputError(
                f"{name!r} is {entry['algorithm']} in the grid {place} and {spec.base(name)} here"
            )
        best = entry["best"]
        if spec.rates_by == "test" and data["selection"] != "test":
            if not data.get("also_by_test"):
                raise InputError(
                    f'rates_by = "test": the grid {place} was not scored by it; run it with '
                    "also_by_test = true"
                )
            best = entry["best_by_test"]
        found[name] = handed_on(f"{name} in {place}", entry, best)
    return found


def summary(
    spec: StudySpec,
    task: Task,
    histories: Mapping[str, Sequence[History]],
    runs: Mapping[str, Sequence[RunSpec]],
) -> dict[str, Any]:
    """Every score and test of a study, ready for JSON."""
    higher = task.metric.higher_is_better
    curves = {label: [curve(h) for h in hs] for label, hs in histories.items()}
    indices = next(iter(curves.values()))[0].indices
    values = {label: [one.metrics for one in each] for label, each in curves.items()}
    finals = {
        label: {rule: [final(h, rule) for h in hs] for rule in FINAL_RULES}
        for label, hs in histories.items()
    }
    labels = list(histories)
    pairs = (
        list(itertools.combinations(labels, 2))
        if spec.tests == "pairs"
        else [(labels[0], other) for other in labels[1:]]
    )
    tested = family({label: each["full"] for label, each in finals.items()}, pairs)
    by_label = {spec.shown(name): name for name in spec.algorithms}
    return {
        "format": FORMAT,
        "task": task.name,
        "label": spec.label,
        "metric": task.metric.name,
        "higher_is_better": higher,
        "selection": str(task.preset.get("selection", "half" if task.tune is not None else "test")),
        "rates": spec.rates,
        "seeds": spec.seeds,
        "rounds": spec.rounds,
        "eval_every": spec.eval_every,
        "window": spec.window,
        "precision": spec.precision,
        "reference": labels[0],
        "complete": len(histories) == len(spec.algorithms),
        **({"stop": spec.stop.model_dump()} if spec.stops else {}),
        "algorithms": {
            label: {
                "algorithm": spec.base(by_label[label]),
                "directory": spec.folder(by_label[label]),
                "options": runs[by_label[label]][0].build_algorithm(task).options(),
                "final": {rule: _spread(each) for rule, each in finals[label].items()},
                "diverged": [h.diverged for h in hs],
                "dropped": sum(r.dropped for h in hs for r in h.records),
                "steps": sum(r.steps for r in whole(hs).records),
                "bytes_down": whole(hs).records[-1].total_bytes_down,
                "bytes_up": whole(hs).records[-1].total_bytes_up,
                "seconds": sum(r.seconds for h in hs for r in h.records),
                **({"stopped": [stopped(h) for h in hs]} if spec.stops else {}),
            }
            for label, hs in histories.items()
        },
        "thresholds": [
            {
                "threshold": threshold,
                "rules": {
                    rule: _reached(indices, values, threshold, rule, spec.window, higher=higher)
                    for rule in RULES
                },
            }
            for threshold in (spec.thresholds or [task.protocol.threshold])
        ],
        "tests": {
            "score": "final, full",
            "family": spec.tests,
            "pairs": [asdict(t) for t in tested],
        },
        "curves": {label: {"indices": indices, "runs": each} for label, each in values.items()},
    }


def _spread(values: list[float]) -> dict[str, Any]:
    finite = all(map(math.isfinite, values))
    return {
        "runs": values,
        "mean": statistics.fmean(values) if finite else None,
        "sd": statistics.stdev(values) if finite and len(values) > 1 else None,
    }


def _reached(
    indices: list[int],
    curves: Mapping[str, list[list[float]]],
    threshold: float,
    rule: ThresholdRule,
    window: int,
    *,
    higher: bool,
) -> dict[str, Any]:
    """When every algorithm reaches a threshold, and how it does after the slowest."""
    arrivals = {
        label: scores.arrival(
            indices, runs, threshold, window=window, rule=rule, higher_is_better=higher
        )
        for label, runs in curves.items()
    }
    late = scores.late_stage_mean(
        indices,
        {label: scores.mean_curve(runs) for label, runs in curves.items()},
        {label: found.averaged for label, found in arrivals.items()},
    )
    return {
        "arrival": {label: asdict(found) for label, found in arrivals.items()},
        "late_stage_mean": late,
    }
