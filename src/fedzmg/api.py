"""The functions most users need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.compare import Comparison, compare_specs
from fedzmg.experiment.work.progress import Progress
from fedzmg.tasks.task import Task

SHARED = ("task", "preset", "algorithm", "seed", "engine", "device")
"""What the algorithms of a comparison have in common."""


def algorithm_names(text: str) -> list[str]:
    """The algorithms that a comma-separated text names; ``all`` stands for the whole table."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return list(ALGORITHMS) if names == ["all"] else names


def compare(
    task: Task | str,
    algorithms: Sequence[str] | str = ("fedzmg", "fedavg", "fedadam"),
    *,
    seeds: int | Sequence[int] = 3,
    rounds: int | None = None,
    preset: Mapping[str, Any] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    engine: Literal["auto", "sequential", "vectorized", "compiled"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    out: Path | str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Train algorithms on the same cohorts and batches, and test the differences.

    Args:
        task: a :class:`Task` or the name of a preset.
        algorithms: names; the first is the reference of the paired tests.
        seeds: how many seeds (0, 1, ...), or which.
        rounds: instead of the task's own number.
        preset: fields of the named preset, e.g. ``{"centring": "image"}``, for all algorithms.
        settings: hyper-parameters by algorithm, e.g. ``{"fedavg": {"client.lr": 0.03}}``.
        engine: ``auto`` measures and picks.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: keep run directories there; the same call continues what was interrupted.
        progress: what shows how far the work is.

    Raises:
        InputError: for an unknown name or a value out of range.
    """
    if isinstance(task, str):
        chosen = tasks.get(task, preset)
    elif preset:
        raise InputError("preset goes with the name of a task: this one is built already")
    else:
        chosen = task
    algorithms = algorithm_names(algorithms) if isinstance(algorithms, str) else algorithms
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InputError(f"seeds = {seeds!r}: give at least one, each once")
    if not algorithms or len(set(algorithms)) != len(algorithms):
        raise InputError(f"algorithms = {list(algorithms)!r}: give at least one, each once")
    for name, changed in (settings or {}).items():
        if name not in algorithms:
            raise unknown("algorithm in settings", name, algorithms)
        for key in changed:
            if key.partition(".")[0] in SHARED:
                raise InputError(
                    f"{key} cannot be set for one algorithm ({name}): it is the same for all"
                )
    common: dict[str, Any] = {"task": chosen.name, "engine": engine, "device": device}
    if rounds is not None:
        common["protocol"] = {"rounds": rounds}
    specs = []
    for name in algorithms:
        spec = RunSpec.parse({**common, "algorithm": name})
        spec = spec.with_settings((settings or {}).get(name, {}))
        # Every mistake is found before the first round is trained.
        spec.resolved(chosen)
        specs.append(spec)
    return compare_specs(chosen, specs, numbers, None if out is None else Path(out), progress)
