"""Verification: train the first rounds of runs and grids again and compare every number.

Runs that were packed together are packed again. On a CPU a trial does not depend on the others, so
a run can also be verified alone; on a GPU it cannot. A grid logs only some rounds. Nothing is
written to the results.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch

from fedzmg.engine.choose import can_compile
from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.grids.proposals import known_packs
from fedzmg.experiment.grids.score import Stops, read_rows
from fedzmg.experiment.grids.search import built, evaluated, trials_of
from fedzmg.experiment.plugin_files import refuse_unloaded, say_changed
from fedzmg.experiment.run_directory import RunDirectory, describe_training, read_manifest
from fedzmg.experiment.specs.files import GridSpec
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.experiment.training import build_simulation
from fedzmg.kernels import threads
from fedzmg.results.diff import Rows, compare_logs
from fedzmg.simulation import Record, Trial, resolve_device
from fedzmg.storage.formats import flat_facts, json_words
from fedzmg.storage.reading import check_folder, files_below
from fedzmg.tasks.task import Task

ROUNDS = 3
REMEDY = "fedzmg.verify(DIR, task=task)"
EXPECTED = "numbers may differ for this reason"
IGNORED = ("started", "finished", "engine_reason", "command", "chunk_changes", "pack_changes")
"""Facts of a manifest that do not affect the bits of a run."""
SHARED = ("pack", "engine", "onednn", "channels_last", "threads", "parallel", "device")
"""Facts that are the same for all runs that trained together."""


class Fact(NamedTuple):
    """A fact of the manifest that has changed."""

    name: str
    then: Any
    now: Any


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one run, or the grid of one algorithm."""

    name: str
    rounds: int  # rounds that were trained again and compared
    first: int | None  # the first round with a difference
    fields: tuple[str, ...]  # fields that differ there, except times
    size: float | None  # largest absolute difference of metric and losses in all of these rounds
    facts: tuple[Fact, ...]
    note: str = ""

    @property
    def reproduced(self) -> bool:
        """True if every bit is the same."""
        return self.rounds > 0 and self.first is None

    def as_dict(self) -> dict[str, Any]:
        return {
            **vars(self), "size": json_words(self.size), "reproduced": self.reproduced,
            "facts": [fact._asdict() for fact in self.facts],
        }  # fmt: skip


class _Kept(NamedTuple):
    """A run, or one algorithm of a grid, on disk."""

    path: Path
    name: str
    facts: Mapping[str, Any]
    rows: Rows

    def judge(self, repeated: Rows, now: Mapping[str, Any], notes: Iterable[str]) -> Verdict:
        """Compare logs, and the manifest with the present one."""
        curves = compare_logs(self.name, self.rows, repeated)
        then, now = flat_facts(self.facts), flat_facts(now)
        keys = self.rows.keys() & repeated.keys()
        shared = {key[-1] if isinstance(key, tuple) else key for key in keys}
        ignored = {*IGNORED, "pack"} if then["device"] == now.get("device") == "cpu" else {*IGNORED}
        ignored |= {"chunk"} if then.get("chunk") is None else set()  # all clients at once, as now
        changed = [k for k in now if k in then and k not in ignored and then[k] != now[k]]
        facts = tuple(Fact(key, then[key], now[key]) for key in changed)
        size = max(curves.largest.values(), default=0.0) if shared else None
        note = "; ".join(dict.fromkeys(notes))
        return Verdict(self.name, len(shared), curves.first, curves.fields, size, facts, note)


def verify(
    path: Path | str, *, rounds: int = ROUNDS, runs: int | None = None, task: Task | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Verdict]:  # fmt: skip
    """Train the first rounds of runs again and compare every number with the log.

    ``path`` is a run directory, a directory that holds some, or a grid. The first ``runs`` are
    verified, of a grid so many algorithms. ``task`` is a user's own; ``say`` receives the name of
    what is trained next. ``InputError``: there is no run, or it needs data or a machine that are
    not here.
    """
    for option, value in (("rounds", rounds), ("runs", runs)):
        if value is not None and value < 1:
            raise InputError(f"{option} = {value}: expected at least 1")
    root, say = Path(path), say or (lambda _: None)
    check_folder(root)
    if (root / "grid.toml").is_file():
        return list(_verify_grid(root, rounds, runs, task, say))
    paths = [spec.parent for spec in files_below(root.resolve(), "spec.toml")[:runs]]
    if not paths:
        raise InputError(f"{root} holds no run (spec.toml): pass the directory of a run or study")
    found: dict[Path, Verdict] = {}
    tasks: dict[str, Task] = {}
    for first in paths:
        if first in found:
            continue
        pack = _read_pack(first, paths, root)
        spec = RunDirectory(first).spec()
        known = f"{spec.task} {sorted(spec.preset.items())}"
        if known not in tasks:
            refuse_unloaded(spec.task if task is None else None, spec.bases(), first, REMEDY)
            tasks[known] = task or spec.build_task()
        say(f"{pack[0].name}, pack of {len(pack)}: first rounds")
        # A run's own file has every option; recommendations of the task may have changed since.
        specs = [RunDirectory(run.path).spec() for run in pack]
        plain = replace(tasks[known], options={}, protocol=spec.build_protocol(tasks[known]))
        names = [run.path.parent.name for run in pack]
        trials = [own.resolve(plain, n).trial for own, n in zip(specs, names, strict=True)]
        notes = list[str]()
        say_changed([pack[0].path], Path(pack[0].name), say, EXPECTED)
        logged = max(round_ for run in pack for round_ in run.rows)
        last = min(rounds, plain.protocol.rounds, logged)
        repeated, now = _repeat(pack, specs[0], plain, trials, last, notes)
        for i, run in enumerate(pack):
            rows = {records[i].round: json_words(records[i].line()) for records in repeated}
            found[run.path] = run.judge(rows, now, notes)
    return [found[path] for path in paths]


def _read_pack(path: Path, asked: Sequence[Path], root: Path) -> list[_Kept]:
    """Read a run and those that trained with it; on a CPU only those that were asked for."""
    run = _read_run(path, root)
    names = [PurePath(str(name)) for name in run.facts.get("pack", [])]
    # Members are directories beside this one, never elsewhere.
    names = [name for name in names if len(name.parts) == 2 and ".." not in name.parts]
    members = [path.parent.parent / name for name in names]
    on_cpu = run.facts["device"] == "cpu"
    if on_cpu:
        members = [member for member in members if member in asked]
    if path not in members or not all((member / "spec.toml").is_file() for member in members):
        return [run]
    pack = [_read_run(member, root) for member in dict.fromkeys(members)]
    alike = [one for one in pack if all(one.facts.get(k) == run.facts.get(k) for k in SHARED)]
    return alike if on_cpu or len(alike) == len(pack) else [run]


def _read_run(path: Path, root: Path) -> _Kept:
    run, name, whole = RunDirectory(path), str(path), root.resolve()
    if path.is_relative_to(whole):
        name = str(root) if path == whole else path.relative_to(whole).as_posix()
    rows: Rows = {record.round: json_words(record.line()) for record in run.records()}
    if not rows:
        raise InputError(f"{path} has no finished round yet: nothing can be compared")
    return _Kept(path, name, run.manifest(), rows)


def _verify_grid(
    root: Path, wanted: int, algorithms: int | None, task: Task | None, say: Callable[[str], None]
) -> Iterator[Verdict]:
    """Train the first rounds of a grid again; yield one verdict per algorithm."""
    spec = GridSpec.read(root / "grid.toml")
    begun = [name for name in spec.algorithms if (root / spec.folder(name)).is_dir()]
    if not begun:
        raise InputError(f"{root} has no finished round yet: nothing can be compared")
    refuse_unloaded(spec.task if task is None else None, spec.bases(), root, REMEDY)
    task = choosing(task or spec.build_task(), spec)
    for name in begun[:algorithms]:
        path, trials = root / spec.folder(name), trials_of(spec, name)
        facts, rows = read_manifest(path), read_rows(path / "metrics.jsonl")
        logged = sorted({round_ for _, round_ in rows if round_ <= wanted})
        if not logged:
            raise InputError(f"{path} has no finished round yet: nothing can be compared")
        say(f"{name}, {len({trial for trial, _ in rows})} trials: first rounds")
        say_changed([path], root, say, EXPECTED)
        kept = _Kept(path, name, facts, {key: json_words(row) for key, row in rows.items()})
        notes, now, repeated = list[str](), dict[str, Any](), dict[Any, Mapping[str, Any]]()
        if len(logged) < wanted:
            notes.append(f"a grid logs only some rounds, here {', '.join(map(str, logged))}")
        stops = Stops(spec, name, task.metric, path / "stopped.jsonl").now
        for whole in known_packs(spec, name, path):
            pack = [i for i in whole if i not in stops or stops[i].round]
            last = max((r for t, r in rows if t in pack and r <= wanted), default=0)
            if not last:
                continue
            own = built(spec, name, task, [trials[i] for i in pack])
            rounds, describes = _repeat([kept], spec, task, own, last, notes, whole[0])
            now = now or describes  # the manifest is that of the first pack
            repeated |= {
                (trial, record.round): json_words(trials[trial].line(trial, record))
                for records in rounds
                for trial, record in zip(pack, records, strict=True)
                if record.metric is not None
            }
        yield kept.judge(repeated, now, notes)


def _repeat(
    pack: Sequence[_Kept], spec: RunSpec | GridSpec, task: Task, trials: Sequence[Trial],
    wanted: int, notes: list[str], number: int | None = None,
) -> tuple[list[list[Record]], dict[str, Any]]:  # fmt: skip
    """Train the first rounds in the recorded environment; return them and the manifest now."""
    facts = pack[0].facts
    data = {"data_sha256": task.train.fingerprint(), "task_sha256": task.fingerprint()}
    if any(facts.get(name, value) != value for name, value in data.items()):
        notes.append(f"{task.name!r} has other data, model or metric: nothing was trained")
        return [], data
    chunk, end = None, wanted
    kinds = ["chunk_changes"] + ["pack_changes"] * (facts["device"] != "cpu")
    # A run that was stopped lacks the changes after it.
    for change in (one for run in pack for kind in kinds for one in run.facts.get(kind, [])):
        if number is not None and change["pack"] != number:
            continue
        if "chunk" not in change:
            end = min(end, change["round"])
        elif change["round"] == 1:  # before anything was stored
            chunk = change["chunk"]
        else:
            end = min(end, change["round"] - 1)
    if facts["device"] == "cuda" and not facts.get("deterministic"):
        notes.append("trained without deterministic = true, so bits may differ on a GPU")
    if end < wanted:
        notes.append(f"only up to round {end}: the pack changed then")
    with _environment(pack[0].name, facts) as device:
        made = build_simulation(task, trials, spec, None, facts=facts, device=device, chunk=chunk)
        rounds = []
        for _ in range(end):
            records = made.run_round().records
            rounds.append(evaluated(spec, made, records) if isinstance(spec, GridSpec) else records)
        return rounds, describe_training(made)


@contextlib.contextmanager
def _environment(name: str, facts: Mapping[str, Any]) -> Iterator[torch.device]:
    """Set the recorded number of threads and yield the recorded device."""
    try:
        device = resolve_device(str(facts["device"]))
    except InputError:
        gpu = f"GPU ({facts.get('device_name')})"
        raise InputError(f"{name} was trained on a {gpu}: verify it where there is one") from None
    if facts["engine"].startswith("compiled") and not can_compile(device):
        raise InputError(f"{name} needs a compiler: install one (g++; on a GPU triton)")
    with threads(int(facts.get("threads", 0))):
        yield device
