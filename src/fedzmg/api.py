"""The functions most users need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError, unknown
from fedzmg.experiment.runs.store import write_json
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.compare import Comparison, compare_specs
from fedzmg.experiment.work.progress import Progress
from fedzmg.formats import read_json
from fedzmg.simulation import Device, EngineName
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
    engine: EngineName = "auto",
    device: Device = "auto",
    out: Path | str | None = None,
    progress: Progress | bool = False,
) -> Comparison:
    """Train algorithms on the same cohorts and batches, and test the differences.

    Args:
        task: a :class:`Task` or the name of a preset.
        algorithms: names; the first is the reference of the paired tests.
        seeds: how many seeds (0, 1, ...), or which.
        rounds: instead of the task's own number.
        preset: fields of the named preset, e.g. ``{"centring": "image"}``, for all algorithms.
        settings: hyper-parameters by algorithm, e.g. ``{"fedavg": {"client.lr": 0.03}}``.
        engine: ``auto`` measures and picks; ``sequential``, ``vectorized``, ``captured`` and
            ``compiled`` as for :func:`fedzmg.simulate`.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: keep run directories and ``comparison.json`` there; the same call continues what was
            interrupted, and ``fedzmg report`` reads it.
        progress: True shows what the command shows, on standard error: bars in a terminal, now and
            then a line elsewhere. By default a call from a program prints nothing. An object of
            your own with ``begin``, ``advance`` and ``say`` is told instead
            (:class:`fedzmg.experiment.work.progress.Progress`).

    Returns:
        Histories and the table: ``print(result)`` shows it, ``result.rows()`` has its numbers.

    Raises:
        InputError: for an unknown name or a value out of range.
    """
    if isinstance(task, str):
        chosen = tasks.get(task, preset)
    elif preset:
        raise InputError("preset goes with the name of a task: this one is built already")
    else:
        chosen = task
    if not isinstance(chosen, Task):
        raise InputError(f"task: expected a Task or a name, not {type(chosen).__name__}")
    algorithms = _names(algorithms)
    numbers = _seeds(seeds)
    if not numbers or len(set(numbers)) != len(numbers):
        raise InputError(f"seeds = {seeds!r}: give at least one, each once")
    if not algorithms or len(set(algorithms)) != len(algorithms):
        raise InputError(f"algorithms = {list(algorithms)!r}: give at least one, each once")
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"settings = {settings!r}: expected {{'fedavg': {{'client.lr': 0.03}}}}")
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"out = {out!r}: expected the path of a directory")
    for name, changed in (settings or {}).items():
        if name not in algorithms:
            raise unknown("algorithm in settings", name, algorithms)
        if not isinstance(changed, Mapping):
            raise InputError(
                f"settings of {name}: {changed!r}; expected options by key, {{'client.lr': 0.1}}"
            )
        for key in changed:
            if not isinstance(key, str):
                raise InputError(f"settings of {name}: {key!r}; expected a key, 'client.lr'")
            if key.partition(".")[0] in SHARED:
                raise InputError(
                    f"{key} cannot be set for one algorithm ({name}): it is the same for all"
                )
    _check_one_protocol(algorithms, settings or {})
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
    place = None if out is None else Path(out)
    before = [] if place is None else compared_in(place)
    with _shown(progress, chosen, algorithms) as told:
        result = compare_specs(chosen, specs, numbers, place, told)
    # One that compares a part of what was compared there leaves the whole as it is.
    if place is not None and set(before) <= set(algorithms):
        write_json(place / "comparison.json", result.as_dict())
    return result


@contextlib.contextmanager
def _shown(progress: Any, task: Task, algorithms: Sequence[str]) -> Iterator[Progress | None]:
    """What is told of the work."""
    if progress is True:
        from rich.console import Console

        from fedzmg.report.terminal.live import Display

        packs = dict.fromkeys(algorithms, 1)
        with Display(Console(stderr=True), task.metric.name, packs) as display:
            yield display
    elif progress is None or progress is False:
        yield None
    elif all(callable(getattr(progress, name, None)) for name in ("begin", "advance", "say")):
        yield progress
    else:
        raise InputError(f"progress = {progress!r}: expected True or False")


def compared_in(place: Path) -> list[str]:
    """The algorithms that a directory's ``comparison.json`` is about.

    Raises:
        InputError: if it does not say.
    """
    path = place / "comparison.json"
    if not path.is_file():
        return []
    try:
        return [row["algorithm"] for row in read_json(path)["algorithms"]]
    except (KeyError, TypeError):
        raise InputError(f"{path} names no algorithms: restore or remove it") from None


def _check_one_protocol(
    algorithms: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> None:
    """Pairs are pairs only on the same cohorts, batches and evaluations."""
    given = {name: settings.get(name, {}) for name in algorithms}
    for name, own in given.items():
        for key, value in own.items():
            if not key.startswith("protocol."):
                continue
            others = [other for other in given if given[other].get(key) != value]
            if others:
                raise InputError(
                    f"{key} = {value} is for {name} and not for {', '.join(others)}: all that are "
                    "compared need the same protocol"
                )


def _names(algorithms: Any) -> list[str]:
    """Names of algorithms, however they were given."""
    if isinstance(algorithms, str):
        return algorithm_names(algorithms)
    found = list(algorithms) if isinstance(algorithms, Sequence) else [algorithms]
    for one in found:
        if isinstance(one, Algorithm):
            raise InputError(
                f"algorithms: compare takes names, not the algorithm {one.name!r}; train it with "
                "simulate(task, [Trial(algorithm, seed)]) and give the histories to Comparison"
            )
        if not isinstance(one, str):
            raise InputError(f"algorithms: expected names, not {type(one).__name__}")
    return found


def _seeds(seeds: Any) -> list[int]:
    """Seeds, given as their number or one by one."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        return list(range(seeds))
    found = list(seeds) if isinstance(seeds, Iterable) else [seeds]
    if not isinstance(seeds, Iterable) or not all(isinstance(seed, Integral) for seed in found):
        raise InputError(f"seeds = {seeds!r}: give their number, 3, or a list of them, [0, 1, 2]")
    return [int(seed) for seed in found]
