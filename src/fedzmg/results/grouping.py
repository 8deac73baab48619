"""Runs that may be compared with each other stand together as a study.

Runs belong to one study when they share the task, its preset and protocol, and the data; within a
study an algorithm with several settings stands under several labels.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from fedzmg.results import paper
from fedzmg.results.runs import Run
from fedzmg.storage.formats import flat

# Runs of this algorithm come before others where nothing says which is meant.
_USUAL_REFERENCE = "fedzmg"


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that may be compared with each other."""

    name: str
    """The task, and what it stands in for or what tells this study from others of it."""
    task: str
    metric: str
    higher_is_better: bool
    thresholds: tuple[float, ...]
    """Levels to be reached; the last is the one that scores speak of first."""
    window: int
    """Evaluations that are averaged on the way to a threshold."""
    every_pair: bool
    """Whether every pair is tested, or every algorithm against the reference."""
    members: Mapping[str, tuple[Run, ...]]
    """Runs by label, reference first, in order of seeds."""
    notes: tuple[str, ...]
    awaited: Mapping[str, int] = field(default_factory=dict)
    """By label, how many runs were asked for of which there is nothing to show yet."""

    @property
    def reference(self) -> str:
        """Label of the algorithm that the others are held against."""
        return next(iter(self.members))

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [run for runs in self.members.values() for run in runs]

    @property
    def threshold(self) -> float | None:
        """The level that scores speak of first."""
        return self.thresholds[-1] if self.thresholds else None

    @property
    def protocol(self) -> Mapping[str, Any]:
        """What all runs share."""
        return dict(self.runs[0].spec.get("protocol", {}))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is tested against what."""
        labels = list(self.members)
        if self.every_pair:
            return list(itertools.combinations(labels, 2))
        return [(self.reference, other) for other in labels[1:]]

    def only(self, labels: Iterable[str]) -> Study:
        """The same study with some of its algorithms."""
        return replace(self, members={label: self.members[label] for label in labels})


def family(label: str) -> str:
    """The family a variant belongs to: what stands before the colon or a remark.

    >>> family("fedadam:reddi"), family("fedzmg (lr 0.1)")
    ('fedadam', 'fedzmg')
    """
    return label.partition(":")[0].partition(" (")[0]


def planned(run: Run, plans: Mapping[str, Mapping[str, Any]]) -> Run:
    """A run, and what the study around it calls it."""
    for place, plan in plans.items():
        for label, entry in plan.get("algorithms", {}).items():
            own = PurePosixPath(place, str(entry.get("directory")), f"seed-{run.seed}")
            if run.path == str(own):
                return replace(run, plan=place, label=label)
    return run


def studies(
    runs: Iterable[Run],
    comparisons: Sequence[Mapping[str, Any]],
    plans: Mapping[str, Mapping[str, Any]],
    notes: list[str],
) -> list[Study]:
    """Group runs.

    Args:
        runs: all that were found.
        comparisons: what every ``comparison.json`` says.
        plans: what every study is to be, by the directory it is in.
        notes: what is left out is added here.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.plan, run.shared], sort_keys=True), []).append(run)
    tasks = []
    for group in groups.values():
        remark = plans.get(group[0].plan, {}).get("label")
        task = paper.shown(group[0].spec["task"])
        tasks.append(f"{task}, {remark}" if remark else task)
    names = _told_apart(tasks, [flat(group[0].shared) for group in groups.values()])
    found = []
    for name, group in zip(names, groups.values(), strict=True):
        task = group[0].spec["task"]
        compared: Mapping[str, Any] = next((c for c in comparisons if c.get("task") == task), {})
        found.append(_study(name, group, plans.get(group[0].plan, compared), notes))
    return found


def _study(name: str, runs: Sequence[Run], plan: Mapping[str, Any], notes: list[str]) -> Study:
    """A study; ``plan`` says what it is to be, or is its ``comparison.json``, if there is one."""
    members = _members(runs, notes)
    listed = plan.get("algorithms", {})
    # A comparison has a list of rows, a study a table by label.
    order = list(listed) if isinstance(listed, Mapping) else [row["algorithm"] for row in listed]

    def position(label: str) -> tuple[int, bool, str]:
        known = label if label in order else members[label][0].algorithm
        place = order.index(known) if known in order else len(order)
        return place, known != _USUAL_REFERENCE, label

    metric, higher, assumed = _metric(runs[0].manifest, plan)
    levels = plan.get("thresholds") or []
    thresholds = [float(level["threshold"]) for level in levels]
    own = runs[0].spec.get("protocol", {}).get("threshold")
    if not thresholds and own is not None:
        thresholds = [float(own)]
    return Study(
        name=name,
        task=str(runs[0].spec["task"]),
        metric=metric,
        higher_is_better=higher,
        thresholds=tuple(sorted(thresholds, reverse=not higher)),
        window=int(plan.get("window", 4)),
        every_pair=plan.get("tests", {}).get("family") == "pairs",
        members={label: members[label] for label in sorted(members, key=position)},
        notes=(assumed,) if assumed else (),
        awaited=_awaited(members, plan),
    )


def _awaited(members: Mapping[str, Sequence[Run]], plan: Mapping[str, Any]) -> dict[str, int]:
    """Runs that an unfinished study has not begun yet."""
    if plan.get("complete", True):
        return {}
    missing = {
        label: len(plan.get("seeds", [])) - len(members.get(label, ()))
        for label in plan["algorithms"]
    }
    return {label: count for label, count in missing.items() if count > 0}


def _metric(manifest: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[str, bool, str]:
    """Name and direction of the metric, and what had to be assumed about them."""
    found = manifest.get("metric", plan.get("metric"))
    if isinstance(found, Mapping):
        return str(found["name"]), bool(found.get("higher_is_better", True)), ""
    higher = bool(manifest.get("higher_is_better", plan.get("higher_is_better", True)))
    if found is not None:
        return str(found), higher, ""
    return "metric", higher, "The runs do not name their metric; more is taken to be better."


def _members(runs: Sequence[Run], notes: list[str]) -> dict[str, tuple[Run, ...]]:
    """Runs by label; of two with the same settings and seed the first stays."""
    by_algorithm: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        variants = by_algorithm.setdefault(run.label or run.algorithm, {})
        seeds = variants.setdefault(json.dumps(run.variant, sort_keys=True), {})
        if run.seed in seeds:
            kept = seeds[run.seed].place
            notes.append(f"{run.place} repeats {kept} (same settings and seed): it is left out")
            continue
        seeds[run.seed] = run
    members = {}
    for algorithm, variants in by_algorithm.items():
        labels = _told_apart([algorithm] * len(variants), [json.loads(text) for text in variants])
        for label, seeds in zip(labels, variants.values(), strict=True):
            members[label] = tuple(seeds[seed] for seed in sorted(seeds))
    return members


def _told_apart(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names, and where one occurs twice, the facts in which its owners differ."""
    out = []
    for name, own in zip(names, facts, strict=True):
        rivals = [other for rival, other in zip(names, facts, strict=True) if rival == name]
        keys = dict.fromkeys(key for other in rivals for key in other)
        differ = [key for key in keys if any(other.get(key) != own.get(key) for other in rivals)]
        told = ", ".join(f"{key.rpartition('.')[2]} {_short(own.get(key))}" for key in differ)
        out.append(f"{name} ({told})" if told else name)
    return out


def _short(value: Any) -> str:
    """A value in a label; a hash needs no more than its beginning."""
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:8] if len(text) == 64 else text
