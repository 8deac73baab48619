"""The circumstances of a run: a number without its manifest does not enter a report."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from fedzmg.experiment.runs.store import FORMAT
from fedzmg.simulation import Simulation
from fedzmg.version import __version__


def describe(simulation: Simulation) -> dict[str, Any]:
    """Versions, machine, data and execution path, with everything that shares a pack."""
    device = simulation.device
    return {
        "format": FORMAT,
        "fedzmg": __version__,
        **_commit(),
        "command": command(sys.argv),
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
        "pack": [f"{t.algorithm.name}/seed-{t.seed}" for t in simulation.trials],
        "metric": simulation.task.metric.name,
        "higher_is_better": simulation.task.metric.higher_is_better,
        "preset": dict(simulation.task.preset),
        "clients": len(simulation.task.train),
        "examples": simulation.task.train.examples.size,
        "data_sha256": simulation.task.train.fingerprint(),
        "task_sha256": simulation.task.fingerprint(),
    }


def command(arguments: Sequence[str]) -> str:
    """What a user typed, as a shell reads it; ``Python`` if another program called.

    >>> command(["/usr/bin/fedzmg", "run", "digits", "--out", "my runs"]), command(["train.py"])
    ("fedzmg run digits --out 'my runs'", 'Python')
    """
    program = PurePath(arguments[0]) if arguments else PurePath()
    if program.stem == "fedzmg" or program.parts[-2:] == ("fedzmg", "__main__.py"):
        return shlex.join(["fedzmg", *arguments[1:]])
    return "Python"


def _commit() -> dict[str, Any]:
    """Commit of the source tree, if the package runs from one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # A checkout that merely contains the environment says nothing about this package.
    if git("ls-files", "--error-unmatch", __file__) is None:
        return {"commit": None, "dirty": None}
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
