"""Whether this machine trains a grid again to the same bits, pack by pack.

A grid logs only the rounds that count, those of a halving, and round 1, so these are compared.
Nothing is written to the grid's directory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedzmg.engine.choose import EngineChoice, EnginePlanner
from fedzmg.errors import InputError
from fedzmg.experiment.grids.grid import choosing
from fedzmg.experiment.grids.log import GridTrial, Log, Rows
from fedzmg.experiment.grids.trials import built, evaluated, packs, trials_of
from fedzmg.experiment.runs import manifest
from fedzmg.experiment.specs.grid import GridSpec
from fedzmg.experiment.specs.own import refuse_own_task
from fedzmg.experiment.specs.run import DTYPES
from fedzmg.experiment.verification.verdict import (
    Compared,
    Verdict,
    circumstances,
    judge,
    other_data,
    remarks,
)
from fedzmg.experiment.work.claims import read_json
from fedzmg.simulation import Simulation
from fedzmg.tasks.task import Task

REMEDY = "fedzmg.verify(DIR, task=task)"
"""How a program verifies what it trained on a task of its own."""


def verify_grid(
    place: Path,
    *,
    rounds: int,
    algorithms: int | None = None,
    task: Task | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Verdict]:
    """Train the first rounds of a grid again; one verdict per algorithm.

    Args:
        place: the directory of a grid.
        rounds: how many rounds.
        algorithms: only so many algorithms, the first of the file.
        task: a user's own task; by default the preset that the grid names.
        say: told what is trained next.

    Raises:
        InputError: if nothing was trained yet, the data are not here, or the grid needs what this
            machine does not have.
    """
    spec = GridSpec.read(place / "grid.toml")
    begun = [name for name in spec.algorithms if (place / spec.folder(name)).is_dir()]
    if not begun:
        raise InputError(f"{place} has no finished round yet: nothing can be compared")
    if task is None:
        refuse_own_task(spec.task, place, REMEDY)
    fitted = choosing(task or spec.build_task(), spec)
    found = []
    for name in begun[:algorithms]:
        if say is not None:
            say(f"{name}, {len(trials_of(spec, name))} trials: first rounds")
        found.append(_verify(spec, name, fitted, place / spec.folder(name), rounds))
    return found


def _verify(spec: GridSpec, name: str, task: Task, place: Path, wanted: int) -> Verdict:
    facts = read_json(place / "manifest.json", None)
    rows = Log(place / "metrics.jsonl").read()
    logged = sorted({round_ for _, round_ in rows if round_ <= wanted})
    if not logged:
        raise InputError(f"{place} has no finished round yet: nothing can be compared")
    moved = other_data(name, task, facts)
    if moved is not None:
        return moved
    trials, now = trials_of(spec, name), dict[str, Any]()
    pairs: list[Compared] = []
    end, notes = logged[-1], remarks(facts)
    if len(logged) < wanted:
        notes.append(f"a grid logs only some rounds, here {', '.join(map(str, logged))}")
    with circumstances(name, facts) as device:
        for pack in packs(spec, range(len(trials))):
            last = min([end, *_changes(facts, pack[0])])
            if last < end:
                notes.append(f"some only up to round {last}: what trained together changed then")
            with tempfile.TemporaryDirectory() as memory:
                places = [Path(memory, str(i)) for i in pack]
                for each in places:
                    each.mkdir()
                simulation = Simulation(
                    task,
                    built(spec, name, task, [trials[i] for i in pack]),
                    rounds=spec.rounds,
                    device=device,
                    dtype=DTYPES[spec.dtype],
                    engine=EnginePlanner(
                        EngineChoice(facts["engine"], "as recorded", facts["onednn"]),
                        chunk=manifest.chunk(facts, task, len(pack)),
                    ),
                    precision=spec.precision,
                    deterministic=spec.deterministic,
                    memory_places=places,
                )
                # The manifest is that of the first pack.
                now = now or manifest.describe(simulation)
                pairs += _again(spec, simulation, pack, trials, rows, last)
    pairs.sort(key=lambda pair: pair.round)
    return judge(name, pairs, facts, now, "; ".join(dict.fromkeys(notes)))


def _changes(facts: Mapping[str, Any], pack: int) -> list[int]:
    """Rounds after which a pack on a GPU was narrower, which moves the last bits."""
    if facts.get("device") == "cpu":
        return []
    return [int(c["round"]) for c in facts.get("pack_changes", []) if c["pack"] == pack]


def _again(
    spec: GridSpec,
    simulation: Simulation,
    pack: Sequence[int],
    trials: Sequence[GridTrial],
    rows: Rows,
    last: int,
) -> list[Compared]:
    """Lines of the log beside what they are now, as far as a pack's trials have any."""
    found: list[Compared] = []
    for _ in range(last):
        records = evaluated(spec, simulation, simulation.run_round().records)
        for trial, record in zip(pack, records, strict=True):
            then = rows.get((trial, record.round))
            if then is not None and record.metric is not None:
                found.append(Compared(record.round, then, trials[trial].line(trial, record)))
    return found
