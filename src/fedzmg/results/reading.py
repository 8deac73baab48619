"""Directories of results, read back as plain data; nothing is trained.

A report may cover any mixture of directories: runs, studies, grids, heterogeneity. Runs belong to
one study when they share the task, its preset and protocol, and the data. Within a study an
algorithm with several settings has several labels.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedzmg.errors import InputError
from fedzmg.results import paper
from fedzmg.results.formatting import slug
from fedzmg.results.runs import Run, read_run
from fedzmg.storage.files import folder_name
from fedzmg.storage.formats import flat, read_json, read_or_empty, read_toml
from fedzmg.storage.reading import walk

_CONTENTS = ("grid.json", "heterogeneity.json")


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that may be compared with each other."""

    name: str  # the task, and the remark or the facts that tell this study from others of it
    task: str
    metric: str
    higher_is_better: bool
    thresholds: tuple[float, ...]  # levels to be reached; the last is the main one
    window: int  # evaluations that are averaged on the way to a threshold
    every_pair: bool  # otherwise every algorithm is tested against the reference
    members: Mapping[str, tuple[Run, ...]]  # runs by label, reference first, in order of seeds
    awaited: Mapping[str, int] = field(default_factory=dict)  # planned runs without results
    plan: Mapping[str, Any] = field(default_factory=dict)  # content of ``study.toml``, if any

    @property
    def reference(self) -> str:
        """Label of the algorithm that the others are tested against."""
        return next(iter(self.members))

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.members.values() for run in runs]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @property
    def threshold(self) -> float | None:
        return self.thresholds[-1] if self.thresholds else None

    @property
    def protocol(self) -> Mapping[str, Any]:
        return dict(self.runs[0].spec.get("protocol", {}))

    @property
    def participation(self) -> Mapping[str, Any]:
        """Choice of clients and local work that all runs share, unless it is the default."""
        # A run in memory does not know it, its plan does.
        own: dict[str, Any] = self.plan.get("federation", {}).get("participation", {})
        return self.runs[0].participation or own

    @property
    def pairs(self) -> list[tuple[str, str]]:
        labels = list(self.members)
        if self.every_pair:
            return list(itertools.combinations(labels, 2))
        return [(self.reference, other) for other in labels[1:]]


class Material(NamedTuple):
    """Everything that a report is made of."""

    names: tuple[str, ...]
    studies: tuple[Study, ...]
    grids: Mapping[str, Mapping[str, Any]]  # grid.json and its directory, by name for files
    heterogeneity: Mapping[str, Mapping[str, Any]]  # heterogeneity.json by suffix for files
    searches: tuple[Mapping[str, Any], ...]  # manifests of the algorithms of grids
    notes: tuple[str, ...]  # runs that were left out, and why


def read(tops: Sequence[Path]) -> Material:
    """Read every run, grid and heterogeneity file below some directories."""
    runs: list[Run] = []
    contents: dict[str, list[dict[str, Any]]] = {name: [] for name in _CONTENTS}
    plans: dict[str, Mapping[str, Any]] = {}
    labels: dict[str, tuple[str, str]] = {}  # study and label by directory of an algorithm
    searches: list[Mapping[str, Any]] = []
    notes: list[str] = []
    names = tuple(top.resolve().name or "root" for top in tops)
    for top, name in zip(tops, names, strict=True):
        any_here = False
        for directory, below, held in walk(top):
            made = ("tables", "figures") if "written.json" in held else ()  # of an earlier report
            below[:] = [name for name in below if name not in made]
            shown = (Path(name) / directory.relative_to(top)).as_posix()
            if "grid.toml" in held:
                searches += map(read_or_empty, sorted(directory.glob("*/manifest.json")))
            if "study.toml" in held:
                where = directory.as_posix()
                plans[where] = read_toml(directory / "study.toml")
                for label, folder in directories(plans[where]).items():
                    labels[(directory / folder).as_posix()] = where, label
            if "spec.toml" in held and (run := read_run(directory, shown, notes)) is not None:
                if directory.name == f"seed-{run.seed}":
                    study, label = labels.get(directory.parent.as_posix(), ("", ""))
                    run = replace(run, plan=study, label=label)
                runs.append(run)
            for file in (file for file in _CONTENTS if file in held):
                contents[file].append({**read_json(directory / file), "directory": shown})
            any_here |= not {"spec.toml", *_CONTENTS}.isdisjoint(held)
        if not any_here:
            what = "no run directory (spec.toml), grid.json or heterogeneity.json"
            raise InputError(f"{top} holds {what}: give a directory of results")
    grids, described = contents.values()
    return Material(
        names, tuple(studies(runs, plans, notes)),
        {f"grid{i}-{slug(name_of(one))}" if grids[1:] else "grid": one
         for i, one in enumerate(grids, 1)},
        {f"-{i}" if described[1:] else "": one for i, one in enumerate(described, 1)},
        tuple(searches), tuple(notes),
    )  # fmt: skip


def name_of(data: Mapping[str, Any]) -> str:
    """Return the name of a grid: its task, and its label if it has one."""
    return ", ".join(filter(None, [paper.shown(str(data["task"])), data.get("label")]))


def axes_of(data: Mapping[str, Any]) -> list[str]:
    """Return the options that any algorithm of a grid is searched over, in order."""
    return list(dict.fromkeys(axis for one in data["algorithms"].values() for axis in one["axes"]))


def variants(plan: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the algorithms of a plan by name; a user may have listed names only."""
    listed = plan.get("algorithms", {})
    return dict(listed) if isinstance(listed, Mapping) else {name: {} for name in listed}


def directories(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the directory of each algorithm of a plan, by label."""
    return {v.get("label") or name: folder_name(name) for name, v in variants(plan).items()}


def studies(runs: Iterable[Run], plans: Mapping[str, Any], notes: list[str]) -> list[Study]:
    """Group runs into studies, with plans by directory."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.plan, run.shared], sort_keys=True), []).append(run)
    found = [group_study(group, plans.get(group[0].plan, {}), notes) for group in groups.values()]
    shared = [flat(group[0].shared) for group in groups.values()]
    names = _distinguished([study.name for study in found], shared)
    return [replace(study, name=name) for study, name in zip(found, names, strict=True)]


def group_study(runs: Sequence[Run], plan: Mapping[str, Any], notes: list[str]) -> Study:
    """Make a study of runs that share task, protocol and data; ``notes`` names dropped runs."""
    by_algorithm: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        settings = by_algorithm.setdefault(run.label or run.algorithm, {})
        seeds = settings.setdefault(json.dumps(run.variant, sort_keys=True), {})
        kept = seeds.setdefault(run.seed, run)
        if kept is not run:
            repeated = f"{run.shown} repeats {kept.shown}"
            notes.append(f"{repeated} (same settings and seed): it is left out")
    members, order = dict[str, tuple[Run, ...]](), list(directories(plan))
    for name, settings in by_algorithm.items():
        labels = _distinguished([name] * len(settings), [json.loads(text) for text in settings])
        for label, seeds in zip(labels, settings.values(), strict=True):
            members[label] = tuple(seeds[seed] for seed in sorted(seeds))

    def position(label: str) -> tuple[int, bool, str]:
        known = label if label in order else members[label][0].algorithm
        index = order.index(known) if known in order else len(order)
        return index, known != "fedzmg", label  # the usual reference of studies without a plan

    task, facts = str(runs[0].spec["task"]), runs[0].manifest
    higher = bool(facts.get("higher_is_better", True))
    own = runs[0].spec.get("protocol", {}).get("threshold")
    thresholds = plan.get("thresholds") or ([] if own is None else [own])
    missing = {label: len(plan.get("seeds", [])) - len(members.get(label, ())) for label in order}
    return Study(
        name_of({**plan, "task": task}), task, str(facts.get("metric", "metric")), higher,
        thresholds=tuple(sorted(map(float, thresholds), reverse=not higher)),
        window=int(plan.get("window", 4)), every_pair=plan.get("tests") == "pairs",
        members={label: members[label] for label in sorted(members, key=position)},
        awaited={label: count for label, count in missing.items() if count > 0}, plan=plan,
    )  # fmt: skip


def _distinguished(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names; to one that occurs twice, add the facts in which its owners differ."""
    out = []
    for name, own in zip(names, facts, strict=True):
        rivals = [other for rival, other in zip(names, facts, strict=True) if rival == name]
        keys = dict.fromkeys(key for other in rivals for key in other)
        differ = [key for key in keys if any(other.get(key) != own.get(key) for other in rivals)]
        remark = ", ".join(f"{key.rpartition('.')[2]} {_short(own.get(key))}" for key in differ)
        out.append(f"{name} ({remark})" if remark else name)
    return out


def _short(value: Any) -> str:
    """Return a value as text for a label; a hash by its first eight digits."""
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:8] if len(text) == 64 else text
