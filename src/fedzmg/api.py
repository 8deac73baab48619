"""The functions most users need."""

import contextlib
import itertools
import operator
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fedzmg import algorithms as registry
from fedzmg import plugins, tasks
from fedzmg.algorithms import ALGORITHMS
from fedzmg.algorithms.options import known_options
from fedzmg.contract import Algorithm, AlgorithmInfo
from fedzmg.errors import InputError, Interrupted, brief, unknown
from fedzmg.experiment.grids.grid import Tuned, run_grid
from fedzmg.experiment.progress import Progress
from fedzmg.experiment.specs.files import GridSpec, StudySpec
from fedzmg.experiment.specs.plan import MOST_SEEDS, Algorithms, Plan, named_algorithms
from fedzmg.experiment.specs.run import SIDES, RunSpec
from fedzmg.experiment.studies.study import run_study, study_packs
from fedzmg.plain_text import plain
from fedzmg.results.study_result import StudyResult
from fedzmg.simulation import Device, EngineName
from fedzmg.tasks.preset import TUNED_ON, tuned, tunings
from fedzmg.tasks.task import Task

COMPARED = ("fedzmg", "fedavg", "fedavg:momentum", "fedadam")


def register(thing: Any) -> None:
    """Add an algorithm, a task or a plugin file to the known names; the same may be added again."""
    if isinstance(thing, str | Path):
        plugins.load(thing)
    elif isinstance(thing, Algorithm | AlgorithmInfo):
        ALGORITHMS.take(thing, plugins.written_in(thing))
    elif isinstance(thing, Task | tasks.Preset):
        tasks.TASKS.take(thing, None)
    else:
        wanted = "an Algorithm, a Task or the path of a Python file"
        raise InputError(f"register({brief(thing)}): expected {wanted}")


def tuning_notes(
    task: str, names: Sequence[str], settings: Collection[str],
    options: Mapping[str, Mapping[str, float]] | None = None,
) -> list[str]:  # fmt: skip
    """Describe algorithms with untuned or doubtful rates; ``settings`` are keys that a user set."""
    known, searches = tuned(task) if options is None else options, tunings(task)
    notes, untuned = [], []
    for name in names:
        if {"client.lr", f"{name}.client.lr"} & set(settings) or name not in ALGORITHMS:
            continue  # unknown names are reported elsewhere
        if name not in known:
            untuned.append(name)
        elif name in searches and searches[name].remark and known[name] == searches[name].options:
            notes.append(f"{name} on {task}: {searches[name].remark}")
        elif task in TUNED_ON:
            notes.append(f"{task}: learning rates tuned on {TUNED_ON[task]}")
    if untuned:
        some = ", ".join(untuned[:3]) + f" and {len(untuned) - 3} more" * (len(untuned) > 3)
        notes.append(f"{some}: default learning rates, not tuned for {task}: try 'fedzmg tune'")
    return list(dict.fromkeys(notes))


def untuned(spec: Plan, objects: Collection[str] = ()) -> list[str]:
    """Return the algorithms of a plan that take their learning rate from the task or a default."""
    unset = [name for name, own in spec.algorithms.items() if "lr" not in own.client]
    return list(dict.fromkeys(spec.base(name) for name in unset if name not in objects))


def comparison_spec(
    task: Task, algorithms: Mapping[str, Mapping[str, Any]], seeds: Sequence[int],
    settings: Mapping[str, Any], **fields: Any,
) -> StudySpec:  # fmt: skip
    """Build the study of a comparison; ``fields`` may be ``rounds``, ``engine`` and ``device``."""
    for name, key in itertools.product(algorithms, settings):
        own = key.removeprefix(f"{name}.")
        table = own.partition(".")[0]
        if own == key or table in (*SIDES, "weights"):
            continue
        if table in RunSpec.model_fields:
            raise InputError(f"{own} cannot be set for one algorithm ({name}), only for all")
        base = str(algorithms[name].get("algorithm", name))
        raise unknown("key", own, known_options(registry.get(base)), f"fedzmg list {base}")
    # Evaluations and rounds are at the top of a study file, in the protocol of a run.
    lifted = {key: f"protocol.{key}" for key in ("rounds", "eval_every")}
    values = {key: v for key, v in settings.items() if key not in lifted.values()}
    top = {key: settings[dotted] for key, dotted in lifted.items() if dotted in settings}
    top |= {key: value for key, value in fields.items() if value is not None}
    study: dict[str, Any] = {"task": task.name, "preset": dict(task.preset)}
    study |= {"rounds": task.protocol.rounds, "eval_every": task.protocol.eval_every}
    study |= {"algorithms": dict(algorithms), "seeds": list(seeds), "rates": "known"}
    spec = StudySpec.parse(study | top).with_settings(values)
    spec.check(task)
    return spec


def compare(
    task: Task | str, algorithms: Algorithms = COMPARED, *, seeds: int | Sequence[int] = 3,
    rounds: int | None = None, preset: Mapping[str, Any] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None, engine: EngineName = "auto",
    device: Device = "auto", out: Path | str | None = None, progress: Progress | bool = False,
) -> StudyResult:  # fmt: skip
    """Train algorithms on the same cohorts and batches, and test the differences.

    Args:
        task: a :class:`Task`, the name of a preset, or ``my_task.py:task``.
        algorithms: names and :class:`Algorithm` objects, or both by names of your own:
            ``{"mine": algorithm, "heavy": ("fedavg", {"client.momentum": 0.9})}``. The first is the
            reference of the paired tests.
        seeds: how many seeds (0, 1, ...), or which.
        rounds: instead of the task's own number.
        preset: fields of the named preset, e.g. ``{"centring": "image"}``.
        settings: hyper-parameters by algorithm, e.g. ``{"fedavg": {"client.lr": 0.03}}``.
        engine: ``auto`` measures and picks; the other names are those of :func:`fedzmg.simulate`.
        device: ``auto``, ``cpu`` or ``cuda``.
        out: keep ``study.toml``, ``study.json`` and run directories there. The same call continues
            an interrupted one, further algorithms and seeds are added, and ``fedzmg report`` reads
            the directory.
        progress: True shows progress on standard error as the command does. An object of your own
            with ``begin``, ``advance`` and ``say`` is called instead
            (:class:`fedzmg.experiment.progress.Progress`).

    Returns:
        Histories, scores and tests: ``print(result)`` shows a table, ``result.scores`` has its
        numbers, ``result.as_dict()`` everything.

    Raises:
        InputError: for an unknown name or a value out of range.
        KeyboardInterrupt: on Ctrl-C, after the round; it says how far the work is.
    """
    chosen, (table, objects) = _task(task, preset), named_algorithms(algorithms)
    numbers, directory = numbered_seeds(seeds), None if out is None else Path(out)
    given = _flat_settings(settings, table)
    options = {"rounds": rounds, "engine": engine, "device": device}
    with ALGORITHMS.including(objects):
        spec = comparison_spec(chosen, table, numbers, given, **options)
        for note in tuning_notes(chosen.name, untuned(spec, objects), (), chosen.options):
            print(plain(f"fedzmg: {note}"), file=sys.stderr)
        with _shown(progress, chosen, dict.fromkeys(study_packs(spec, chosen), 1)) as shown:
            return run_study(spec, directory, task=chosen, progress=shown, grow=True, models=True)


def tune(
    task: Task | str, algorithms: Algorithms, axes: Mapping[str, Iterable[float]], *,
    seeds: int | Sequence[int] = 1, rounds: int | None = None, last: int | None = None,
    halving: Iterable[tuple[int, int]] = (), preset: Mapping[str, Any] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    selection: Literal["tune", "test"] = "tune", search: Literal["grid", "optuna"] = "grid",
    budget: int = 40, engine: EngineName = "auto", device: Device = "auto",
    out: Path | str | None = None, progress: Progress | bool = False,
) -> Tuned:  # fmt: skip
    """Search learning rates, or any other numbers, over the combinations of the axes.

    Arguments and errors are those of :func:`compare`, except for:

    - ``task``: a :class:`Task` needs examples that are set apart for this (``tune``).
    - ``algorithms``: one without an option of ``axes`` has an axis less.
    - ``axes``: numbers to try by option, ``{"client.lr": [0.01, 0.1], "server.lr": [0.1, 1]}``.
    - ``seeds``: how many seeds (1000, 1001, ...: none that a comparison uses by default), or which.
    - ``last``: a score is the mean metric after so many last rounds, by default ten at most.
    - ``halving``: ``[(50, 16), (150, 4)]`` continues the best 16 points after round 50 and the best
      4 after round 150; the first seed decides, the other seeds train the points that are left.
    - ``settings``: hyper-parameters that stay as they are.
    - ``selection``: ``tune`` scores on the examples set apart, ``test`` on the test examples, after
      which a comparison on these is not an honest test.
    - ``search``: ``grid`` trains every combination, ``optuna`` only ``budget`` of them for each
      algorithm, which Optuna proposes eight at a time.

    Returns:
        The best options: ``compare(task, ..., settings=tuned.settings)``. ``print(tuned)`` shows
        them, and warns of those on the border of the search.
    """
    chosen, (table, objects) = _task(task, preset), named_algorithms(algorithms)
    directory = None if out is None else Path(out)
    how = {"halving": [list(r) for r in halving], "method": search, "budget": budget}
    fields = {"selection": selection, "engine": engine, "device": device, "search": how}
    given = _flat_settings(settings, table)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ALGORITHMS.including(objects))
        spec = search_spec(chosen, table, axes, seeds, given, rounds=rounds, last=last, **fields)
        shown = stack.enter_context(_shown(progress, chosen, spec.packs()))
        where = directory or Path(stack.enter_context(TemporaryDirectory(prefix="fedzmg-tune-")))
        try:
            return Tuned(run_grid(spec, where, task=chosen, progress=shown))
        except Interrupted as error:
            raise Interrupted(error.done, error.rounds, kept=out is not None) from None


def search_spec(
    task: Task, algorithms: Mapping[str, Mapping[str, Any]], axes: Mapping[str, Iterable[float]],
    seeds: int | Sequence[int], settings: Mapping[str, Any], *, rounds: int | None = None,
    last: int | None = None, **fields: Any,
) -> GridSpec:  # fmt: skip
    """Build the grid of a search; ``fields`` are others of its own."""
    try:
        values = {key: [float(value) for value in own] for key, own in axes.items()}
    except (AttributeError, TypeError, ValueError):
        example = {"client.lr": [0.1, 1.0]}
        raise InputError(f"axes = {axes!r}: expected numbers by option, {example}") from None
    total = task.protocol.rounds if rounds is None else rounds
    last = min(10, total) if last is None and isinstance(total, int) else last
    given: dict[str, Any] = {"task": task.name, "preset": dict(task.preset), "last": last}
    given |= {"algorithms": dict(algorithms), "axes": values, "rounds": total}
    given |= {"seeds": numbered_seeds(seeds, first=1000), **fields}
    return GridSpec.parse(given).with_settings(settings)


def _task(task: Any, preset: Mapping[str, Any] | None) -> Task:
    if isinstance(task, str):
        return tasks.get(task, preset)
    if not isinstance(task, Task):
        raise InputError(f"task: expected a Task or a name, not {type(task).__name__}")
    if preset:
        raise InputError(f"preset = {preset!r}: expected with the name of a task, not with a Task")
    return task


def numbered_seeds(seeds: Any, first: int = 0) -> list[int]:
    """Return seeds that were given as their number or one by one."""
    try:
        given = range(first, first + seeds) if isinstance(seeds, int) else seeds
        # One more than allowed, which is refused like a long list.
        found = [operator.index(seed) for seed in itertools.islice(given, MOST_SEEDS + 1)]
    except TypeError:
        found = []
    if not found:
        raise InputError(f"seeds = {brief(seeds)}: expected their number or a list of them")
    return found


def _flat_settings(settings: Any, algorithms: Collection[str]) -> dict[str, Any]:
    """Return settings by ``ALGORITHM.KEY``; settings of a round that all share keep their key."""
    found = {}
    try:
        for name, own in (settings or {}).items():
            if name not in algorithms:
                raise unknown("algorithm in settings", name, algorithms)
            for key, value in own.items():
                shared = key.startswith(("protocol.", "federation.")) and all(
                    settings.get(other, {}).get(key) == value for other in algorithms
                )
                found[key if shared else f"{name}.{key}"] = value
    except AttributeError:  # a part is not a mapping, a key is not text
        example = {"fedavg": {"client.lr": 0.03}}
        raise InputError(f"settings = {settings!r}: expected {example}") from None
    return found


def _shown(
    progress: Progress | bool, task: Task, packs: Mapping[str, int]
) -> contextlib.AbstractContextManager[Progress | None]:
    if progress is not True:
        return contextlib.nullcontext(progress or None)
    from fedzmg.terminal.live import Display
    from fedzmg.terminal.render import Terminal

    return Display(Terminal(stderr=True), task.metric.name, packs)
