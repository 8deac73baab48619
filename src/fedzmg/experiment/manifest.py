"""Manifests: versions, machine, data and execution path of a training."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedzmg.errors import InputError
from fedzmg.experiment.rules_hash import FACT, rules_sha256
from fedzmg.experiment.run_directory import FORMAT
from fedzmg.experiment.specs.plan import Plan
from fedzmg.provenance import provenance
from fedzmg.simulation import Simulation
from fedzmg.storage.formats import read_json, write_json
from fedzmg.tasks.task import Task

FINISHED = "finished"
"""Time of a run's last checkpoint; absent while there are rounds to train."""


def describe(simulation: Simulation) -> dict[str, Any]:
    """Describe versions, machine, data, execution path and the trials of a pack."""
    device, task = simulation.device, simulation.task
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "format": FORMAT,
        **provenance(),
        "started": now(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "dtype": str(simulation.dtype).removeprefix("torch."),
        "precision": simulation.precision,
        "deterministic": simulation.deterministic,
        "engine": simulation.choice.path,
        "onednn": simulation.choice.onednn,
        "engine_reason": simulation.choice.reason,
        "chunk": simulation.chunk,
        "pack": members(simulation),
        "metric": task.metric.name,
        "higher_is_better": task.metric.higher_is_better,
        "preset": dict(task.preset),
        "clients": len(task.train),
        "examples": task.train.examples.size,
        "data_sha256": task.train.fingerprint(),
        "task_sha256": task.fingerprint(),
        # Trials of a pack differ in numbers only.
        FACT: rules_sha256(simulation.trials[0].algorithm),
    }


def now() -> str:
    """Return the current time as a manifest records it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def members(simulation: Simulation) -> list[str]:
    """Name the trials of a pack by directory in a study, else by algorithm."""
    return [
        f"{Plan.folder(trial.name) or trial.algorithm.name}/seed-{trial.seed}"
        for trial in simulation.trials
    ]


def note(directory: Path, **facts: Any) -> None:
    """Change facts of a manifest; None removes a fact."""
    path = directory / "manifest.json"
    before = read_json(path)
    after = {k: v for k, v in {**before, **facts}.items() if k not in facts or v is not None}
    if after != before:
        write_json(path, after)


def note_change(directory: Path, name: str, change: Mapping[str, Any]) -> None:
    """Record a change of the pack; it replaces those of the same and later rounds.

    In a grid, packs train one after another and have the number of their first trial, which a pack
    of revoked trials may have, too.
    """
    number = change.get("pack"), change.get("revoked")
    kept = [
        one
        for one in read_json(directory / "manifest.json").get(name, [])
        if one["round"] < change["round"]
        or (isinstance(one.get("pack"), int) and (one["pack"], one.get("revoked")) != number)
    ]
    note(directory, **{name: [*kept, change]})


def chunk(facts: Mapping[str, Any], task: Task, trials: int) -> int | None:
    """Return the number of clients that trained at once; None if it does not affect results.

    On a GPU another width changes the last bits, so all clients at once is a number there.
    """
    found: int | None = facts.get("chunk")
    if found is None and facts["device"] == "cuda":
        return trials * task.protocol.cohort
    return found


def refuse_other_task(directory: Path, facts: Mapping[str, Any], task: Task) -> None:
    """Refuse to continue with other data, or another model, test set or metric."""
    for name, now_, what in (
        ("data_sha256", task.train.fingerprint(), "other data"),
        ("task_sha256", task.fingerprint(), "another model, test set or metric"),
    ):
        if facts.get(name, now_) != now_:
            now_has = f"{what} than {task.name!r} has now"
            raise InputError(f"{directory} was trained with {now_has}: choose another --out")
