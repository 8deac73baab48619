"""Work of every peer and its report; needs NumPy only.

A folder holds the work: the examples, the batches of every round, the model to start from. A peer
writes its times and two of its global models to another folder, and is compared by those.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Facts:
    """Settings of the work."""

    network: str
    """Key in every peer's table of networks."""
    dropout: bool
    """Off where models are compared: no two systems draw the same masks."""
    population: int
    lr: float
    device: str
    precision: str


@dataclass(frozen=True)
class Work:
    """Complete work."""

    facts: Facts
    x: npt.NDArray[Any]
    """Examples as stored: floats, or bytes that stand for pixels."""
    y: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int64]
    """Positions in ``x``: ``[round, client, step, example]``."""
    start: Arrays
    """Initial model by parameter name, in PyTorch's layouts."""

    @property
    def steps(self) -> int:
        """Local steps of a round, all clients together."""
        return self.batches.shape[1] * self.batches.shape[2]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return count(self.start)

    def save(self, folder: Path) -> None:
        """Write the folder."""
        folder.mkdir(parents=True)
        for name in ("x", "y", "batches"):
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.savez(folder / "start.npz", **self.start)
        (folder / "facts.json").write_text(json.dumps(asdict(self.facts)))

    @classmethod
    def load(cls, folder: Path) -> Work:
        """Read what :meth:`save` wrote."""
        x, y, batches = (np.load(folder / f"{name}.npy") for name in ("x", "y", "batches"))
        facts = Facts(**json.loads((folder / "facts.json").read_text()))
        return cls(facts, x, y, batches, load_arrays(folder / "start.npz"))


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read a model by parameter name."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def count(arrays: Arrays) -> int:
    """Number of entries of all arrays."""
    return sum(array.size for array in arrays.values())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Stopwatch:
    """Times rounds, and keeps the global model after the first and the last of them."""

    def __init__(self, work: Work, out: Path) -> None:
        self._out, self._rounds = out, len(work.batches)
        self._seconds: list[float] = []
        self._steps: list[int] = []
        self._first_done = 0.0
        self._began = 0.0

    def begin(self) -> None:
        """Start a round."""
        self._began = time.perf_counter()

    def end(self, steps: int, model: Callable[[], Arrays]) -> None:
        """End a round, after the device has finished."""
        self._seconds.append(time.perf_counter() - self._began)
        self._steps.append(steps)
        if len(self._seconds) == 1:
            self._first_done = time.time()
            np.savez(self._out / "first.npz", **model())
        if len(self._seconds) == self._rounds:
            np.savez(self._out / "last.npz", **model())

    def report(self, packages: Sequence[str], note: str = "") -> None:
        """Write the times, once all rounds are done."""
        report = {
            "seconds": self._seconds,
            "steps": self._steps,
            "first_done": self._first_done,
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "note": note,
        }
        (self._out / "report.json").write_text(json.dumps(report))


def begin() -> tuple[Work, Stopwatch]:
    """Read the directories of work and report from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    work = Work.load(arguments.work)
    return work, Stopwatch(work, arguments.out)
