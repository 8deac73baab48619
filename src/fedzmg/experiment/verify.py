"""Verification: train the first rounds of runs and grids again and compare every number.

Runs that were packed together are packed again if all of them exist. On a CPU a trial does not
depend on the others, so a run can be verified alone; on a GPU it cannot. A grid logs only some
rounds. Nothing is written to the results: client memory goes to a temporary directory.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedzmg.engine.choose import can_compile
from fedzmg.errors import InputError
from fedzmg.experiment import manifest, rules_hash
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.grids.search import built, evaluated, packs, trials_of
from fedzmg.experiment.plan_directory import read_rows
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.experiment.specs.files import refuse_own_task
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.plan import Plan
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.training import build_simulation, recorded_engine
from fedzmg.results.diff import Rows, compare_logs
from fedzmg.simulation import Record, Simulation, Trial, resolve_device
from fedzmg.simulation import packs as same_structure
from fedzmg.storage.formats import json_words, read_json
from fedzmg.tasks.task import Task

ROUNDS = 3
REMEDY = "fedzmg.verify(DIR, task=task)"
IGNORED = ("started", "finished", "engine_reason", "command", "chunk_changes", "pack_changes")
"""Facts of a manifest that do not affect the bits of a run."""


class Fact(NamedTuple):
    """A fact of the manifest that has changed."""

    name: str
    then: Any
    now: Any


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one run, or the grid of one algorithm."""

    name: str
    rounds: int
    """Rounds that were trained again and compared."""
    first: int | None
    """The first round with a difference."""
    fields: tuple[str, ...]
    """Fields that differ there, except times."""
    size: float | None
    """Largest absolute difference of metric and losses in all of these rounds."""
    facts: tuple[Fact, ...]
    note: str = ""

    @property
    def reproduced(self) -> bool:
        """True if every bit is the same."""
        return self.rounds > 0 and self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict ready for JSON."""
        return {
            **vars(self),
            "size": json_words(self.size),
            "facts": [fact._asdict() for fact in self.facts],
            "reproduced": self.reproduced,
        }


class _Kept(NamedTuple):
    path: Path
    name: str
    spec: RunSpec
    facts: Mapping[str, Any]
    records: list[Record]
    variant: str
    """Its directory in a study, if its manifest names the pack so. Older manifests name runs by
    algorithm, which does not tell variants apart."""

    @property
    def member(self) -> str:
        """Name of the run in its manifest's pack."""
        return f"{self.variant or self.spec.algorithm}/seed-{self.spec.seed}"


def verify(
    path: Path | str,
    *,
    rounds: int = ROUNDS,
    runs: int | None = None,
    task: Task | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Verdict]:
    """Train the first rounds of runs again and compare every number with the log.

    Args:
        path: a run directory, a directory that holds some, or a grid.
        rounds: number of rounds of each run.
        runs: maximum number of runs, by name; for a grid, of algorithms.
        task: a user's own task; by default the preset that the runs name.
        say: receives the name of what is trained next.

    Returns:
        One verdict per run, or per algorithm of a grid; ``reproduced`` if every bit is the same.

    Raises:
        InputError: if there is no run, the data are missing, or the run needs what this machine
            does not have.
    """
    for option, value in (("rounds", rounds), ("runs", runs)):
        if value is not None and value < 1:
            raise InputError(f"{option} = {value}: expected at least 1")
    root, say = Path(path), say or (lambda _: None)
    if (root / "grid.toml").is_file():
        return _verify_grid(root, rounds, runs, task, say)
    if not root.is_dir():
        raise InputError(f"{root} is not a directory; pass a run directory or one that holds some")
    asked = [_read(path.parent, root) for path in sorted(root.rglob("spec.toml"))[:runs]]
    if not asked:
        raise InputError(
            f"{root} holds no run directory (spec.toml): pass a directory that 'fedzmg run', "
            "'compare' or 'study' wrote"
        )
    names = [run.name for run in asked]
    found: list[Verdict] = []
    tasks: dict[str, Task] = {}
    for pack in _packs([*asked, *_neighbours(asked, root)]):
        if not any(run.name in names for run in pack):
            continue
        spec = pack[0].spec
        known = f"{spec.task} {sorted(spec.preset.items())}"
        if task is None and known not in tasks:
            refuse_own_task(spec.task, pack[0].path, REMEDY)
            tasks[known] = spec.build_task()
        others = f" and {len(pack) - 1} trained with it" if len(pack) > 1 else ""
        say(f"{pack[0].name}{others}: first rounds")
        found += _verify_pack(task or tasks[known], pack, rounds)
    return sorted((v for v in found if v.name in names), key=lambda v: names.index(v.name))


def _read(directory: Path, root: Path) -> _Kept:
    run = RunDirectory(directory)
    facts, records, spec = run.manifest(), run.records(), run.spec()
    for name in ("engine", "onednn", "data_sha256"):
        if name not in facts:
            raise InputError(f"{directory}/manifest.json lacks {name!r}: use the version of it")
    if not records:
        raise InputError(f"{directory} has no finished round yet: nothing can be compared")
    name = str(directory)
    if directory.is_relative_to(root):
        name = directory.relative_to(root).as_posix()
    pack, folder = facts.get("pack", []), directory.resolve().parent.name
    unique = f"{folder}/seed-{spec.seed}" in pack and len(set(pack)) == len(pack)
    shown = str(root) if name == "." else name
    return _Kept(directory, shown, spec, facts, records, folder if unique else "")


def _neighbours(runs: Sequence[_Kept], root: Path) -> list[_Kept]:
    """Read other runs of the same packs, if these affect the last bits."""
    known = {run.path.resolve() for run in runs}
    found: list[_Kept] = []
    for run in runs:
        if run.facts.get("device") == "cpu" or len(run.facts.get("pack", [])) < 2:
            continue
        whole = run.path.resolve()
        paths = sorted(path.parent for path in whole.parent.glob("*/spec.toml"))
        if run.variant:
            paths = [whole.parent.parent / name for name in run.facts["pack"]]
        for path in paths:
            if path not in known and (path / "spec.toml").is_file():
                known.add(path)
                found.append(_read(path, root))
    return found


def _packs(runs: Sequence[_Kept]) -> list[list[_Kept]]:
    """Group runs that trained together, in their order; split packs that are not complete."""
    groups: dict[str, list[_Kept]] = {}
    for run in runs:
        groups.setdefault(f"{run.facts.get('pack')} {_shared(run)}", []).append(run)
    found: list[list[_Kept]] = []
    for members in groups.values():
        pack = list(members[0].facts.get("pack", []))
        by_name = {run.member: run for run in members}
        whole = len(by_name) == len(members) == len(pack) and set(by_name) == set(pack)
        found += [[by_name[name] for name in pack]] if whole else [[run] for run in members]
    return found


def _shared(run: _Kept) -> str:
    """Describe the settings that runs of one pack share; copies of a study are other packs."""
    own: dict[str, Any] = {"seed": 0}
    if not run.variant:
        return run.spec.model_copy(update=own).model_dump_json()
    own |= {"algorithm": "", "weights": None, "client": {}, "server": {}}
    study = run.path.resolve().parent.parent
    return f"{study} {run.spec.model_copy(update=own).model_dump_json()}"


def _verify_pack(task: Task, pack: Sequence[_Kept], wanted: int) -> list[Verdict]:
    # A run's own file has every option; recommendations of the task may have changed since.
    plain = replace(task, options={}, protocol=pack[0].spec.build_protocol(task))
    trials = [replace(run.spec.resolve(plain).trial, name=run.variant) for run in pack]
    if len(same_structure(plain, trials)) > 1:  # changed since
        return [verdict for run in pack for verdict in _verify_pack(task, [run], wanted)]
    facts = pack[0].facts
    moved = [_other_data(run.name, plain, facts) for run in pack]
    if moved[0] is not None:
        return [verdict for verdict in moved if verdict is not None]
    chunk = manifest.chunk(facts, plain, len(pack))
    changes = [(change["round"], change["chunk"]) for change in facts.get("chunk_changes", [])]
    # A change in the first round came before anything was stored.
    chunk = next((size for round_, size in reversed(changes) if round_ == 1), chunk)
    ends = [round_ - 1 for round_, _ in changes if round_ > 1]
    ends += [int(change["round"]) for change in facts.get("pack_changes", [])]
    limit, notes = min([wanted, *ends]), _remarks(facts)
    if limit < wanted:
        notes.insert(0, f"only up to round {limit}: the pack changed then")
    end = min(limit, max(run.records[-1].round for run in pack))
    with _simulation(pack[0].name, plain, trials, pack[0].spec, facts, chunk) as training:
        rounds = [training.run_round().records for _ in range(end)]
        now = manifest.describe(training)
    found = []
    for i, run in enumerate(pack):
        then = {r.round: json_words(r._asdict()) for r in run.records}
        repeated = {each[i].round: json_words(each[i]._asdict()) for each in rounds}
        found.append(_judge(run.name, then, repeated, run.facts, now, notes))
    return found


def _verify_grid(
    root: Path,
    rounds: int,
    algorithms: int | None,
    task: Task | None,
    say: Callable[[str], None],
) -> list[Verdict]:
    """Train the first rounds of a grid again; return one verdict per algorithm."""
    spec = GridSpec.read(root / "grid.toml")
    begun = [name for name in spec.algorithms if (root / spec.folder(name)).is_dir()]
    if not begun:
        raise InputError(f"{root} has no finished round yet: nothing can be compared")
    if task is None:
        refuse_own_task(spec.task, root, REMEDY)
    fitted = choosing(task or spec.build_task(), spec)
    found = []
    for name in begun[:algorithms]:
        say(f"{name}, {len(trials_of(spec, name))} trials: first rounds")
        found.append(_verify_search(spec, name, fitted, root / spec.folder(name), rounds))
    return found


def _verify_search(spec: GridSpec, name: str, task: Task, directory: Path, wanted: int) -> Verdict:
    facts = read_json(directory / "manifest.json")
    rows = read_rows(directory / "metrics.jsonl")
    logged = sorted({round_ for _, round_ in rows if round_ <= wanted})
    if not logged:
        raise InputError(f"{directory} has no finished round yet: nothing can be compared")
    moved = _other_data(name, task, facts)
    if moved is not None:
        return moved
    trials, now = trials_of(spec, name), dict[str, Any]()
    repeated: dict[tuple[int, int], Mapping[str, Any]] = {}
    end, notes = logged[-1], _remarks(facts)
    if len(logged) < wanted:
        notes.append(f"a grid logs only some rounds, here {', '.join(map(str, logged))}")
    changes = [] if facts.get("device") == "cpu" else facts.get("pack_changes", [])
    for pack in packs(spec, range(len(trials))):
        last = min([end, *(int(c["round"]) for c in changes if c["pack"] == pack[0])])
        if last < end:
            notes.append(f"some only up to round {last}: the pack changed then")
        own = built(spec, name, task, [trials[i] for i in pack])
        chunk = manifest.chunk(facts, task, len(pack))
        with _simulation(name, task, own, spec, facts, chunk) as training:
            # The manifest is that of the first pack.
            now = now or manifest.describe(training)
            for _ in range(last):
                records = evaluated(spec, training, training.run_round().records)
                repeated |= {
                    (trial, record.round): json_words(trials[trial].line(trial, record))
                    for trial, record in zip(pack, records, strict=True)
                    if record.metric is not None
                }
    then = {key: json_words(line) for key, line in rows.items()}
    return _judge(name, then, repeated, facts, now, list(dict.fromkeys(notes)))


@contextlib.contextmanager
def _simulation(
    name: str,
    task: Task,
    trials: Sequence[Trial],
    spec: RunSpec | Plan,
    facts: Mapping[str, Any],
    chunk: int | None,
) -> Iterator[Simulation]:
    """Build a simulation in the recorded environment; its client memory is temporary."""
    with _environment(name, facts) as device, tempfile.TemporaryDirectory() as memory:
        paths = [Path(memory, str(i)) for i in range(len(trials))]
        for path in paths:
            path.mkdir()
        engine = recorded_engine(facts)
        yield build_simulation(
            task, trials, spec, paths, recorded=engine, device=device, chunk=chunk
        )


def _judge(
    name: str,
    logged: Rows,
    repeated: Rows,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    notes: Sequence[str],
) -> Verdict:
    """Compare logs, and the manifest with the present one."""
    curves = compare_logs(name, logged, repeated)
    shared = {key[-1] if isinstance(key, tuple) else key for key in logged.keys() & repeated.keys()}
    ignored = [*IGNORED, *(["pack"] if then.get("device") == now.get("device") == "cpu" else [])]
    ignored += ["chunk"] if then.get("chunk") is None else []  # all clients at once, as now
    facts = tuple(
        Fact(key, then[key], value)
        for key, value in now.items()
        if key in then and key not in ignored and then[key] != value
    )
    size = max(curves.largest.values(), default=0.0) if shared else None
    note = "; ".join(notes)
    return Verdict(name, len(shared), curves.first, curves.fields, size, facts, note)


def _other_data(name: str, task: Task, facts: Mapping[str, Any]) -> Verdict | None:
    """Return the verdict if a task has changed; None if it has not."""
    data = {"data_sha256": task.train.fingerprint(), "task_sha256": task.fingerprint()}
    moved = [
        Fact(key, facts[key], now)
        for key, now in data.items()
        if key in facts and facts[key] != now
    ]
    note = f"{task.name!r} has other data, model or metric than then: nothing was trained"
    return Verdict(name, 0, None, (), None, tuple(moved), note) if moved else None


def _remarks(facts: Mapping[str, Any]) -> list[str]:
    """Return reasons why bits may differ on any machine."""
    notes = []
    since = [change["round"] for change in facts.get(rules_hash.CHANGES, [])]
    if since:
        notes.append(f"its rules changed while it trained, first in round {min(since)}")
    if os.environ.get("OMP_NUM_THREADS", str(facts.get("threads"))) != str(facts.get("threads")):
        notes.append("OMP_NUM_THREADS is set, which may override the recorded threads")
    if facts.get("device") == "cuda" and not facts.get("deterministic"):
        notes.append("trained without deterministic = true, so bits may differ on a GPU")
    return notes


@contextlib.contextmanager
def _environment(name: str, facts: Mapping[str, Any]) -> Iterator[torch.device]:
    """Set the recorded number of threads and yield the recorded device."""
    try:
        device = resolve_device(str(facts.get("device", "cpu")))
    except InputError:
        raise InputError(
            f"{name} was trained on a GPU ({facts.get('device_name')}), and this machine has "
            "none: verify it on one that has"
        ) from None
    if facts["engine"].startswith("compiled") and not can_compile(device):
        raise InputError(
            f"{name} was trained with compiled steps, and there is no compiler here: install "
            "one (g++; on a GPU triton)"
        )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(int(facts.get("threads", before)))
        yield device
    finally:
        torch.set_num_threads(before)
