"""The functions most users need."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fedzmg import tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.contract import Algorithm
from fedzmg.errors import InputError, Interrupted, unknown
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.grids.tuned import Tuned
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.studies.compare import Comparison, compare_specs
from fedzmg.simulation import Device, EngineName
from fedzmg.storage.formats import read_json, write_json
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
        engine: ``auto`` measures and picks; the other names are those of :func:`fedzmg.simulate`.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: keep run directories and ``comparison.json`` there; the same call continues what was
            interrupted, and ``fedzmg report`` reads it.
        progress: True shows what the command shows, on standard error: bars in a terminal, now and
            then a line elsewhere. By default nothing is shown, as a program may make many calls.
            An object of your own with ``begin``, ``advance`` and ``say`` is told instead
            (:class:`fedzmg.experiment.progress.Progress`).

    Returns:
        Histories and the table: ``print(result)`` shows it, ``result.rows()`` has its numbers.

    Raises:
        InputError: for an unknown name or a value out of range.
        KeyboardInterrupt: on Ctrl-C, after the round; it says how far the work is.
    """
    chosen, algorithms = _task(task, preset), _names(algorithms)
    numbers, place = _seeds(seeds), _place(out)
    _check_settings(settings, algorithms)
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
    before = [] if place is None else compared_in(place)
    _say_untuned(chosen, algorithms, settings or {})
    with _shown(progress, chosen, dict.fromkeys(algorithms, 1)) as told:
        result = compare_specs(chosen, specs, numbers, place, told)
    # One that compares a part of what was compared there leaves the whole as it is.
    if place is not None and set(before) <= set(algorithms):
        write_json(place / "comparison.json", result.as_dict())
    return result


def tune(
    task: Task | str,
    algorithms: Sequence[str] | str,
    axes: Mapping[str, Iterable[float]],
    *,
    seeds: int | Sequence[int] = 1,
    rounds: int | None = None,
    last: int | None = None,
    preset: Mapping[str, Any] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    selection: Literal["tune", "test"] = "tune",
    engine: EngineName = "auto",
    device: Device = "auto",
    out: Path | str | None = None,
    progress: Progress | bool = False,
) -> Tuned:
    """Search rates, or any other numbers: every combination of the axes, side by side.

    Args:
        task: a :class:`Task` with examples set apart for this (``tune``), or the name of a preset.
        algorithms: names; one without an option of ``axes`` has an axis less.
        axes: numbers to try by option, ``{"client.lr": [0.01, 0.1], "server.lr": [0.1, 1]}``.
        seeds: how many seeds (1000, 1001, ...: none that a comparison uses by default), or which.
        rounds: instead of the task's own number.
        last: a score is the mean metric after so many last rounds, by default ten at most.
        preset: fields of the named preset.
        settings: hyper-parameters that stay as they are, by algorithm, e.g.
            ``{"fedavg": {"client.momentum": 0.9}}``.
        selection: ``tune`` scores on the examples set apart, ``test`` on the test examples, after
            which a comparison on these is no honest test.
        engine: as for :func:`compare`.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: keep the search there; the same call continues what was interrupted, and
            ``fedzmg report`` reads it.
        progress: as for :func:`compare`.

    Returns:
        The best options: ``compare(task, ..., settings=tuned.settings)``. ``print(tuned)`` shows
        them, and warns of those on the border of the search.

    Raises:
        InputError: for an unknown name, a value out of range, or a task without examples set apart.
        KeyboardInterrupt: on Ctrl-C, after the round; it says how far the work is.
    """
    chosen, algorithms = _task(task, preset), _names(algorithms)
    numbers, place = _seeds(seeds, first=1000), _place(out)
    _check_settings(settings, algorithms)
    total = chosen.protocol.rounds if rounds is None else rounds
    spec = GridSpec.parse(
        {
            "task": chosen.name,
            "preset": dict(chosen.preset),
            "algorithms": algorithms,
            "axes": _axes(axes),
            "seeds": numbers,
            "rounds": total,
            "last": min(10, total) if last is None and isinstance(total, int) else last,
            "selection": selection,
            "engine": engine,
            "device": device,
        }
    )
    fixed = {f"{name}.{key}": v for name, own in (settings or {}).items() for key, v in own.items()}
    spec = spec.with_settings(fixed)
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(_shown(progress, chosen, spec.packs()))
        where = place or Path(stack.enter_context(TemporaryDirectory(prefix="fedzmg-tune-")))
        try:
            return Tuned(run_grid(spec, where, task=chosen, progress=told))
        except Interrupted as error:
            raise Interrupted(error.done, error.rounds, kept=place is not None) from None


def _task(task: Any, preset: Mapping[str, Any] | None) -> Task:
    """The task that was given or named."""
    if isinstance(task, str):
        return tasks.get(task, preset)
    if preset:
        raise InputError("preset goes with the name of a task: this one is built already")
    if not isinstance(task, Task):
        raise InputError(f"task: expected a Task or a name, not {type(task).__name__}")
    return task


def _place(out: Any) -> Path | None:
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"out = {out!r}: expected the path of a directory")
    return None if out is None else Path(out)


def _axes(axes: Any) -> dict[str, list[float]]:
    """Numbers by option, from any sequences."""
    if not isinstance(axes, Mapping) or not axes:
        raise InputError(
            f"axes = {axes!r}: expected numbers by option, {{'client.lr': [0.01, 0.1]}}"
        )
    try:
        return {key: [float(value) for value in values] for key, values in axes.items()}
    except (TypeError, ValueError):
        raise InputError(f"axes = {axes!r}: expected lists of numbers by option") from None


def _check_settings(settings: Any, algorithms: Sequence[str]) -> None:
    """Refuse settings that are not options of these algorithms by key."""
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"settings = {settings!r}: expected {{'fedavg': {{'client.lr': 0.03}}}}")
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


def _say_untuned(
    task: Task, algorithms: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> None:
    """A line on standard error where rates are nobody's choice: they decide who looks best."""
    if task.preset or task.name in tasks.TASKS:
        return
    left = [
        name
        for name in algorithms
        if name not in task.options and "client.lr" not in settings.get(name, {})
    ]
    if left:
        whose = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        print(
            f"fedzmg: default rates, not tuned for {task.name!r}: {whose} (fedzmg.tune searches)",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _shown(progress: Any, task: Task, packs: Mapping[str, int]) -> Iterator[Progress | None]:
    """What is told of the work."""
    if progress is True:
        from rich.console import Console

        from fedzmg.report.terminal.live import Display

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
        algorithms = algorithm_names(algorithms)
    found = list(algorithms) if isinstance(algorithms, Sequence) else [algorithms]
    for one in found:
        if isinstance(one, Algorithm):
            raise InputError(
                f"algorithms: compare takes names, not the algorithm {one.name!r}; train it with "
                "simulate(task, [Trial(algorithm, seed)]) and give the histories to Comparison"
            )
        if not isinstance(one, str):
            raise InputError(f"algorithms: expected names, not {type(one).__name__}")
    if not found or len(set(found)) != len(found):
        raise InputError(f"algorithms = {found!r}: give at least one, each once")
    return found


def _seeds(seeds: Any, first: int = 0) -> list[int]:
    """Seeds, given as their number or one by one."""
    found: list[Any]
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        found = list(range(first, first + seeds))
    else:
        found = list(seeds) if isinstance(seeds, Iterable) else [None]
    if not all(isinstance(seed, Integral) for seed in found):
        raise InputError(f"seeds = {seeds!r}: give their number, 3, or a list of them, [0, 1, 2]")
    if not found or len(set(found)) != len(found):
        raise InputError(f"seeds = {seeds!r}: give at least one, each once")
    return [int(seed) for seed in found]
