"""Whether this machine trains a run again to the same bits: its first rounds, side by side.

Runs that were packed together are packed again where all of them are there. On a processor a trial
does not depend on its neighbours, so there a run may also be looked at alone; on a GPU it may not.
Nothing is written to the run's directory: what clients remember goes to a temporary place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import InputError
from fedzmg.experiment.runs import manifest
from fedzmg.experiment.runs.store import RunDirectory
from fedzmg.experiment.specs.own import refuse_own_task
from fedzmg.experiment.specs.run import DTYPES, RunSpec
from fedzmg.experiment.verification.grids import REMEDY, verify_grid
from fedzmg.experiment.verification.verdict import (
    Compared,
    Verdict,
    circumstances,
    judge,
    other_data,
    remarks,
)
from fedzmg.simulation import Record, Simulation, packs
from fedzmg.tasks.task import Task

ROUNDS = 3


class _Kept(NamedTuple):
    path: Path
    name: str
    spec: RunSpec
    facts: Mapping[str, Any]
    records: list[Record]
    variant: str
    """Its directory in a study, if its manifest names the members of its pack so; manifests of
    older versions name them by their algorithms, which variants of one share."""

    @property
    def member(self) -> str:
        """What its manifest calls it."""
        return f"{self.variant or self.spec.algorithm}/seed-{self.spec.seed}"


def verify(
    place: Path | str,
    *,
    rounds: int = ROUNDS,
    runs: int | None = None,
    task: Task | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Verdict]:
    """Train the first rounds of runs again and compare every number with the log.

    Args:
        place: a run directory, a directory that holds some, or a grid.
        rounds: how many rounds of each.
        runs: only so many runs, the first by name; of a grid so many algorithms.
        task: a user's own task; by default the preset that the runs name.
        say: told what is trained next.

    Returns:
        One verdict per run, or per algorithm of a grid; ``reproduced`` if every bit is the same.

    Raises:
        InputError: if there is no run, the data are not here, or the run needs what this machine
            does not have.
    """
    if rounds < 1:
        raise InputError(f"rounds = {rounds}: expected at least 1")
    if runs is not None and runs < 1:
        raise InputError(f"runs = {runs}: expected at least 1")
    place = Path(place)
    if (place / "grid.toml").is_file():
        return verify_grid(place, rounds=rounds, algorithms=runs, task=task, say=say)
    asked = [_read(directory, place) for directory in _find(place)[:runs]]
    names = [run.name for run in asked]
    found: list[Verdict] = []
    tasks: dict[str, Task] = {}
    for pack in _packs([*asked, *_neighbours(asked, place)]):
        if not any(run.name in names for run in pack):
            continue
        spec = pack[0].spec
        known = f"{spec.task} {sorted(spec.preset.items())}"
        if task is None and known not in tasks:
            refuse_own_task(spec.task, pack[0].path, REMEDY)
            tasks[known] = spec.build_task()
        if say is not None:
            others = f" and {len(pack) - 1} beside it" if len(pack) > 1 else ""
            say(f"{pack[0].name}{others}: first rounds")
        found += _verify(task or tasks[known], pack, rounds)
    return sorted(
        (verdict for verdict in found if verdict.name in names),
        key=lambda verdict: names.index(verdict.name),
    )


def _find(place: Path) -> list[Path]:
    if not place.is_dir():
        raise InputError(f"{place} is no directory: give a run directory or one that holds some")
    found = sorted(path.parent for path in place.rglob("spec.toml"))
    if not found:
        raise InputError(
            f"{place} holds no run directory (spec.toml): give a directory that 'fedzmg run', "
            "'compare' or 'study' wrote"
        )
    return found


def _read(directory: Path, place: Path) -> _Kept:
    run = RunDirectory(directory)
    facts = run.manifest()
    for name in ("engine", "onednn", "data_sha256"):
        if name not in facts:
            raise InputError(
                f"{directory}/manifest.json lacks {name!r}: it was made by another version, with "
                "which it can be verified"
            )
    inside = directory.is_relative_to(place)
    name = directory.relative_to(place).as_posix() if inside else str(directory)
    records = run.records()
    if not records:
        raise InputError(f"{directory} has no finished round yet: nothing can be compared")
    shown = str(place) if name == "." else name
    spec = run.spec()
    return _Kept(directory, shown, spec, facts, records, _variant(directory, spec.seed, facts))


def _variant(directory: Path, seed: int, facts: Mapping[str, Any]) -> str:
    pack, folder = facts.get("pack", []), directory.resolve().parent.name
    return folder if f"{folder}/seed-{seed}" in pack and len(set(pack)) == len(pack) else ""


def _neighbours(runs: Sequence[_Kept], place: Path) -> list[_Kept]:
    """Other runs that trained beside these, where that moves the last bits."""
    known = {run.path.resolve() for run in runs}
    found: list[_Kept] = []
    for run in runs:
        if run.facts.get("device") == "cpu" or len(run.facts.get("pack", [])) < 2:
            continue
        for path in _beside(run):
            if path not in known:
                known.add(path)
                found.append(_read(path, place))
    return found


def _beside(run: _Kept) -> list[Path]:
    """Directories of runs that may have trained beside one."""
    whole = run.path.resolve()
    if run.variant:
        places = [whole.parent.parent / name for name in run.facts["pack"]]
        return [place for place in places if (place / "spec.toml").is_file()]
    return sorted(path.parent for path in whole.parent.glob("*/spec.toml"))


def _packs(runs: Sequence[_Kept]) -> list[list[_Kept]]:
    """Runs that trained side by side, in their order; those without their neighbours, alone."""
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
    """What runs of one pack have in common; where names do not tell variants apart, all but seeds.

    A study is in one directory, so that its copy is another pack.
    """
    own: dict[str, Any] = {"seed": 0}
    if not run.variant:
        return run.spec.model_copy(update=own).model_dump_json()
    own |= {"algorithm": "", "weights": None, "client": {}, "server": {}}
    study = run.path.resolve().parent.parent
    return f"{study} {run.spec.model_copy(update=own).model_dump_json()}"


def _verify(task: Task, pack: Sequence[_Kept], wanted: int) -> list[Verdict]:
    # Everything is written out in a run's own file; what a task recommends today is beside it.
    plain = replace(task, options={}, protocol=pack[0].spec.build_protocol(task))
    if len(packs(plain, [run.spec.trial(plain) for run in pack])) > 1:  # changed since
        return [verdict for run in pack for verdict in _verify(task, [run], wanted)]
    facts = pack[0].facts
    moved = [other_data(run.name, plain, facts) for run in pack]
    if moved[0] is not None:
        return [verdict for verdict in moved if verdict is not None]
    limit, chunk, note = _comparable(pack[0], wanted, manifest.chunk(facts, plain, len(pack)))
    end = min(limit, max(run.records[-1].round for run in pack))
    with circumstances(pack[0].name, facts) as device, tempfile.TemporaryDirectory() as place:
        simulation = _simulation(plain, pack, device, chunk, Path(place))
        again = [simulation.run_round().records for _ in range(end)]
        now = manifest.describe(simulation)
    return [_judge(run, [each[i] for each in again], now, note) for i, run in enumerate(pack)]


def _comparable(run: _Kept, wanted: int, chunk: int | None) -> tuple[int, int | None, str]:
    """Rounds that trained in one shape, the chunk they trained in, and what to say about them."""
    changes = [(change["round"], change["chunk"]) for change in run.facts.get("chunk_changes", [])]
    # One in the first round came before anything was kept.
    chunk = next((size for round_, size in reversed(changes) if round_ == 1), chunk)
    ends = [round_ - 1 for round_, _ in changes if round_ > 1]
    ends += [int(change["round"]) for change in run.facts.get("pack_changes", [])]
    limit = min([wanted, *ends])
    changed = f"only up to round {limit}: what trained together changed then"
    notes = [*([changed] if limit < wanted else []), *remarks(run.facts)]
    return limit, chunk, "; ".join(notes)


def _simulation(
    task: Task, pack: Sequence[_Kept], device: torch.device, chunk: int | None, place: Path
) -> Simulation:
    first = pack[0]
    places = [place / str(i) for i in range(len(pack))]
    for each in places:
        each.mkdir()
    return Simulation(
        task,
        [replace(run.spec.trial(task), name=run.variant) for run in pack],
        rounds=task.protocol.rounds,
        device=device,
        dtype=DTYPES[first.spec.dtype],
        engine=EnginePlanner(
            EngineChoice(first.facts["engine"], "as recorded", first.facts["onednn"]), chunk=chunk
        ),
        precision=first.spec.precision,
        deterministic=first.spec.deterministic,
        memory_places=places,
    )


def _judge(run: _Kept, again: Sequence[Record], now: Mapping[str, Any], note: str) -> Verdict:
    then = {record.round: record for record in run.records}
    pairs = [
        Compared(record.round, then[record.round]._asdict(), record._asdict())
        for record in again
        if record.round in then
    ]
    return judge(run.name, pairs, run.facts, now, note)
