"""A task that trains in milliseconds, and a tracker that records what it receives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedzmg import Task
from fedzmg.data.federated import examples
from fedzmg.experiment.progress import Silent
from fedzmg.simulation import RoundReport
from fedzmg.trackers import Ending, TrackedRun


def toy_task() -> Task:
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), [4, 9, 6, 3, 8, 5])
    x, y = rng.normal(size=(len(owner), 5)), rng.integers(0, 3, len(owner))
    made = Task.from_arrays(
        nn.Linear(5, 3), x, y, owner, test=(x[1::2], y[1::2]), name="toy",
        rounds=5, cohort=3, batch_size=4, eval_every=2,
    )  # fmt: skip
    return replace(made, tune=examples(x[0::2], y[0::2]))


class Recorder:
    """Tracker that records everything."""

    def __init__(self, kept: list[Recorder], fails_at: int | None = None) -> None:
        self.run: TrackedRun | None = None
        self.logged: dict[int, dict[str, float]] = {}
        self.ending: Ending | None = None
        self.fails_at = fails_at
        kept.append(self)

    def start(self, run: TrackedRun) -> None:
        self.run = run
        if self.fails_at == 0:
            raise RuntimeError("no such\nserver")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise RuntimeError("no such\nserver")
        assert step not in self.logged
        self.logged[step] = dict(values)

    def finish(self, ending: Ending) -> None:
        self.ending = ending


class ProgressLog(Silent):
    """Progress observer that records messages, and may stop after some rounds."""

    def __init__(self, stop: int | None = None) -> None:
        self.messages: list[str] = []
        self.rounds: list[int] = []
        self.stop = stop

    def advance(self, report: RoundReport) -> None:
        self.rounds.append(report.round)
        if report.round == self.stop:
            raise MemoryError

    def say(self, text: str) -> None:
        self.messages.append(text)


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
