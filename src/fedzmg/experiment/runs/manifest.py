"""The circumstances of a run: a number without its manifest does not enter a report."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from fedzmg.experiment.runs.rules import FACT, rules_sha256
from fedzmg.experiment.runs.store import FORMAT
from fedzmg.experiment.specs.plan import Plan
from fedzmg.provenance import provenance
from fedzmg.simulation import Simulation
from fedzmg.tasks.task import Task

FINISHED = "finished"
"""When the last checkpoint of a run was written; not there while there is something to train."""


def describe(simulation: Simulation) -> dict[str, Any]:
    """Versions, machine, data and execution path, with everything that shares a pack."""
    device = simulation.device
    return {
        "format": FORMAT,
        **provenance(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device.type,
        "device_name": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        ),
        "threads": torch.get_num_threads(),
        "dtype": str(simulation.dtype).removeprefix("torch."),
        "precision": simulation.precision,
        "deterministic": simulation.deterministic,
        "engine": simulation.choice.path,
        "onednn": simulation.choice.onednn,
        "engine_reason": simulation.choice.reason,
        "chunk": simulation.chunk,
        "pack": members(simulation),
        "metric": simulation.task.metric.name,
        "higher_is_better": simulation.task.metric.higher_is_better,
        "preset": dict(simulation.task.preset),
        "clients": len(simulation.task.train),
        "examples": simulation.task.train.examples.size,
        "data_sha256": simulation.task.train.fingerprint(),
        "task_sha256": simulation.task.fingerprint(),
        # Trials of a pack differ in numbers only.
        FACT: rules_sha256(simulation.trials[0].algorithm),
    }


def members(simulation: Simulation) -> list[str]:
    """What trains side by side: by its directory in a study, else by its algorithm.

    Variants of one algorithm have directories of their own, so that no two share a name.
    """
    return [
        f"{Plan.folder(trial.name) or trial.algorithm.name}/seed-{trial.seed}"
        for trial in simulation.trials
    ]


def chunk(facts: Mapping[str, Any], task: Task, trials: int) -> int | None:
    """How many clients of so many trials trained at once; None: it does not matter.

    On a GPU other widths move the last bits, so all at once is a number there, too.
    """
    found: int | None = facts.get("chunk")
    if found is None and facts["device"] == "cuda":
        return trials * task.protocol.cohort
    return found
