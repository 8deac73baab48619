"""Grids: searches over hyper-parameters, in which the trials of an algorithm train together.

::

    grid.toml                   the specification
    grid.json                   scores, best points, neighbours; rewritten after every algorithm
    ALGORITHM/manifest.json     versions, device, data hash, execution path
    ALGORITHM/metrics.jsonl     a line per trial and evaluated round, append-only; later lines win
    ALGORITHM/stopped.jsonl     a line per trial that was stopped early
    ALGORITHM/scores.json       once it is finished; it is not trained again
    ALGORITHM/checkpoint.safetensors, ALGORITHM/memory    only until then
"""

import contextlib
import itertools
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedzmg.errors import InputError
from fedzmg.experiment import training
from fedzmg.experiment.grids import search
from fedzmg.experiment.plugin_files import say_changed
from fedzmg.experiment.progress import Progress, Silent
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.training import FORMAT, REMAKE
from fedzmg.plain_text import plain, printable
from fedzmg.results.formatting import aligned, count_text, options_text
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task
from fedzmg.tree import tree_map

CHECKPOINT_SECONDS = 60.0  # less often than a run: a checkpoint holds all trials of a pack


def run_grid(
    spec: GridSpec, out: Path, *, task: Task | None = None, progress: Progress | None = None,
    max_minutes: float | None = None, checkpoint_seconds: float | None = None, remote: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train every point of the grid and score it; return the content of ``grid.json``.

    A directory that holds this grid is continued; finished algorithms are not trained again.
    ``task`` is a user's own. ``remote``, such as ``fedzmg.cluster.packs.Packs``, trains in other
    processes. A mistake raises ``InputError``; other errors are those of ``training_loop``.
    """
    progress, end = progress or Silent(), training.deadline(max_minutes)
    seconds = training.checkpoint_interval(CHECKPOINT_SECONDS, checkpoint_seconds)
    spec.check(task)
    whole = task or spec.build_task()
    task = choosing(whole, spec)
    spec.check_participation(task)
    reporting = whole.test if spec.also_by_test else None
    folders = {name: out / spec.folder(name) for name in spec.algorithms}
    with contextlib.ExitStack() as stack:
        held, _ = stack.enter_context(training.claimed(out, spec, "grid.toml", progress.say))
        found: dict[str, Any] = {}
        # Finished algorithms are only read, but they must be of the same data.
        for inner in folders.values():
            search.known_facts(inner, task)
        say_changed(folders.values(), out, progress.say)
        left = {n: path for n, path in folders.items() if not (path / "scores.json").is_file()}
        names: Iterable[str] = folders
        if remote is not None and left:
            done = [name for name in folders if name not in left]
            there = remote.train_grid(spec, whole, left, progress, end, seconds)
            names = itertools.chain(done, stack.enter_context(contextlib.closing(there)))
        for name in names:
            path, scores = folders[name], folders[name] / "scores.json"
            if not scores.is_file():
                search.Search(spec, name, task, path, progress, end, seconds, held, reporting).run()
            else:
                progress.begin(name, spec.rounds, spec.rounds)
            found[name] = read_json(scores, REMAKE, FORMAT, spec=out / "grid.toml")
            if found[name].get("label") != spec.shown(name):
                raise InputError(f"{scores} is not of {name}: {REMAKE}")
            with training.named_write_errors(out):
                # Also after a crash: a scored algorithm never trains again.
                shutil.rmtree(path / "memory", ignore_errors=True)
                shutil.rmtree(path / search.PACKS, ignore_errors=True)
                (path / search.CHECKPOINT).unlink(missing_ok=True)
                write_json(out / "grid.json", _summary(spec, task, found), spec=out / "grid.toml")
    return read_json(out / "grid.json", REMAKE, FORMAT, spec=out / "grid.toml")


def choosing(task: Task, spec: GridSpec) -> Task:
    """Return the task of a grid: its protocol, and as test data the examples that choose."""
    test = task.test
    if spec.selection == "tune":
        if task.tune is None:
            remedy = 'pass some as tune=..., or set selection = "test"'
            raise InputError(f"task {task.name!r} has no tuning examples: {remedy}")
        test = task.tune
    elif task.tune is not None and task.tune.x is not task.test.x:
        test = tree_map(lambda *pair: torch.cat(pair), task.tune, task.test)
    # Rounds in between are not evaluated; the search evaluates those that count.
    options = {**spec.protocol, "rounds": spec.rounds, "eval_every": spec.rounds}
    protocol = task.protocol.with_options(options)
    owners = task.test_owners if test is task.test else None
    return replace(task, test=test, test_owners=owners, protocol=protocol)


def _summary(spec: GridSpec, task: Task, found: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: found[name] for name in spec.algorithms if name in found}
    return {
        "format": FORMAT, "task": task.name, "label": spec.label, "metric": task.metric.name,
        "higher_is_better": task.metric.higher_is_better, "selection": spec.selection,
        **({"also_by_test": True} if spec.also_by_test else {}), "examples": task.test.size,
        "rounds": spec.rounds, "last": spec.last, "seeds": spec.seeds, "preset": dict(task.preset),
        "precision": spec.precision, "complete": len(found) == len(spec.algorithms),
        **({"stop": spec.stop.model_dump()} if spec.stop.diverged else {}),
        **({"halving": spec.search.halving} if spec.search.halving else {}), "algorithms": found,
    }  # fmt: skip


def chosen_options(
    name: str, entry: Mapping[str, Any], best: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fixed options of an entry of ``grid.json`` and those of the chosen point."""
    if best is None:
        raise InputError(f"every point of {name} diverged: search smaller learning rates")
    weights = {"weights": entry["weights"]} if entry.get("weights") else {}
    return {**weights, **entry["fixed"], **best["options"]}


def warnings(data: Mapping[str, Any]) -> list[str]:
    """Return warnings about a grid: borders, divergence, heuristics."""
    # A line does not begin with an algorithm, because the command's name is put before it.
    found = []
    for name, entry in data["algorithms"].items():
        best = entry["best"]
        if best is None:
            found.append(f"every point of {name} diverged; search smaller learning rates")
        elif best["border"]:
            edges = ", ".join(f"{key} = {best['options'][key]:.4g}" for key in best["border_axes"])
            found.append(f"the best point of {name} lies on the border ({edges}): widen the grid")
        other = entry.get("best_by_test")
        if best is not None and other is not None and other["options"] != best["options"]:
            found.append(f"for {name} the whole test set, as in the paper, chooses {_point(other)}")
        if halved := entry.get("stopped", {}).get("halving", 0):
            found.append(f"halving stopped {halved} trials of {name}; one of them might have won")
    return found


@dataclass(frozen=True)
class Tuned:
    """Best options of every algorithm on a task; ``print`` shows them."""

    data: Mapping[str, Any] = field(repr=False)  # ``grid.json``: every point and its score

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Best options by algorithm, as ``compare(task, ..., settings=...)`` takes them."""
        found = self.data["algorithms"].items()
        return {name: chosen_options(name, entry, entry["best"]) for name, entry in found}

    @property
    def warnings(self) -> list[str]:
        found = warnings(self.data)
        if self.data["selection"] == "test":
            found.append("chosen by the test set: a comparison on it is not an honest test")
        return found

    def __repr__(self) -> str:
        found = self.data["algorithms"].items()
        points = "; ".join(f"{name} {_point(entry['best'])}" for name, entry in found)
        return plain(f"<Tuned on {self.data['task']!r}: {points}>")

    def __str__(self) -> str:
        data, entries = self.data, self.data["algorithms"]
        best = [entry["best"] for entry in entries.values()]
        points = [entry["points"] for entry in entries.values()]
        columns = {
            "algorithm": list(entries),
            "best point": [_point(point) for point in best],
            data["metric"]: ["" if point is None else f"{point['score']:.4f}" for point in best],
            "points": [str(len(each)) for each in points],
            "diverged": [str(sum(p["diverged"] > 0 for p in each) or "") for each in points],
        }
        what = "tuning" if data["selection"] == "tune" else "test"
        head = f"{data['task']}, {count_text(len(data['seeds']), 'seed')}, {data['rounds']} rounds"
        over = f"after the last {data['last']} rounds, on {data['examples']:,} {what} examples"
        foot = [f"{data['metric']}: mean {over}", *self.warnings]
        return printable("\n".join([head, "", aligned(columns, words=2), "", *foot]))


def _point(best: Mapping[str, Any] | None) -> str:
    return "none" if best is None else options_text(best["options"])
