"""Points of a grid that Optuna proposes, batch after batch.

Optuna sees the positions of values on their axes and the scores of earlier points; a point that
our rules stopped early is a pruned one. A batch is logged before it trains. Nothing of Optuna is
stored: its study is built again from our logs, and a batch depends on them and the seed alone.
"""

import importlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg import seeds
from fedzmg.experiment.grids.score import Rows, score
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import Stopped
from fedzmg.storage.files import sync
from fedzmg.storage.formats import append_log, log_lines
from fedzmg.tasks.task import Task

LOG = "proposed.jsonl"
MOST_REPEATS = 20  # proposals of known points after which an unknown one is drawn


def packs(spec: GridSpec, trials: Sequence[int]) -> list[list[int]]:
    """Group the numbers of trials that train together."""
    if spec.search.halving:  # the first seeds decide which of the others train
        first = [trial for trial in trials if trial % len(spec.seeds) == 0]
        others = [trial for trial in trials if trial % len(spec.seeds)]
        return [pack for pack in (first, others) if pack]
    size = spec.together or max(len(trials), 1)
    return [list(trials[i : i + size]) for i in range(0, len(trials), size)]


def known_packs(spec: GridSpec, name: str, path: Path) -> list[list[int]]:
    """Return the packs of an algorithm, with Optuna those proposed so far."""
    if spec.search.method == "grid":
        return packs(spec, range(spec.trials(name)))
    return [pack for batch in _batches(path) for pack in packs(spec, _trials(spec, batch))]


def all_packs(
    spec: GridSpec, name: str, path: Path, task: Task, rows: Rows, stops: Mapping[int, Stopped]
) -> Iterator[list[int]]:
    """Yield the packs of an algorithm; each is trained before the next proposal."""
    yield from known_packs(spec, name, path)
    while spec.search.method == "optuna":
        before = _batches(path)
        left = spec.trials(name) // len(spec.seeds) - sum(map(len, before))
        if left <= 0:
            break
        batch = propose(spec, name, task, rows, stops, min(left, spec.search.batch), before)
        path.mkdir(parents=True, exist_ok=True)
        append_log(path / LOG, [{"points": batch}])
        sync(path / LOG)  # no checkpoint of the batch may outlive it
        yield from packs(spec, _trials(spec, batch))


def _batches(path: Path) -> list[list[int]]:
    remedy = f"restore it, or remove {path} to start again"
    return log_lines(path / LOG, lambda line: list(map(int, line["points"])), remedy)


def propose(
    spec: GridSpec, name: str, task: Task, rows: Rows, stops: Mapping[int, Stopped], number: int,
    before: Sequence[Sequence[int]],
) -> list[int]:  # fmt: skip
    """Return the points of a batch, all of them new."""
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = spec.axes_of(name)
    shape = tuple(map(len, axes.values()))
    space = {k: optuna.distributions.IntDistribution(0, len(v) - 1) for k, v in axes.items()}
    direction = "maximize" if task.metric.higher_is_better else "minimize"
    key = seeds.key(spec.seeds[0], "rule", "proposals", len(before))
    sampler = optuna.samplers.TPESampler(seed=key % 2**32)
    study = optuna.create_study(sampler=sampler, direction=direction)
    for entry in score(spec, name, task, rows, stops)["points"]:
        at = [axes[key].index(value) for key, value in entry["options"].items()]
        facts: dict[str, Any] = {"value": entry["score"]}
        if entry["score"] is None or not math.isfinite(entry["score"]):
            facts = {"state": optuna.trial.TrialState.PRUNED}
            point = int(np.ravel_multi_index(at, shape))
            # The mean metric after every round, over the seeds that have it.
            curve, trials = defaultdict[int, list[float]](list), _trials(spec, [point])
            for (trial, round_), row in rows.items():
                if trial in trials and math.isfinite(row["metric"]):
                    curve[round_].append(row["metric"])
            means = {round_: statistics.fmean(curve[round_]) for round_ in sorted(curve)}
            facts["intermediate_values"] = means
        params = dict(zip(axes, at, strict=True))
        study.add_trial(optuna.create_trial(params=params, distributions=space, **facts))
    left, found = set(range(math.prod(shape))).difference(*before), list[int]()
    for _ in range(min(number, len(left))):
        for _ in range(MOST_REPEATS):
            asked = study.ask(space).params
            point = int(np.ravel_multi_index([asked[axis] for axis in axes], shape))
            if point in left:
                break
        else:
            point = sorted(left)[key % len(left)]
        left.remove(point)
        found.append(point)
    return found


def _trials(spec: GridSpec, points: Sequence[int]) -> list[int]:
    size = len(spec.seeds)
    return [point * size + seed for point in points for seed in range(size)]
