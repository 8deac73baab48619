"""A federation that trains in milliseconds, and progress objects that interrupt it."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedzmg import Task
from fedzmg.data.federated import examples
from fedzmg.experiment.progress import Silent
from fedzmg.simulation import History, RoundReport


def toy(seed: int = 0, **protocol: Any) -> Task:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(6), [4, 9, 6, 3, 8, 5])
    x, y = rng.normal(size=(len(owner), 5)), rng.integers(0, 3, len(owner))
    made = Task.from_arrays(
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), x, y, owner,
        test=(x[1::2], y[1::2]), name="toy",
        **{"cohort": 3, "batch_size": 5, "epochs": 1, **protocol},
    )  # fmt: skip
    return replace(made, tune=examples(x[0::2], y[0::2]))


def bare(records: Iterable[Any]) -> list[Any]:
    """Records without the time that rounds took."""
    return [r._replace(seconds=0) for r in records]


def same(one: Iterable[History], other: Iterable[History]) -> bool:
    """Equal records and models, bit for bit."""
    return all(
        bare(a.records) == bare(b.records)
        and all(torch.equal(a.params[n].cpu(), b.params[n].cpu()) for n in a.params)
        for a, b in zip(one, other, strict=True)
    )


class Stop(Silent):
    """Raises an error after some rounds of some pack: a crash, or Ctrl-C."""

    def __init__(self, after: int, pack: int = 1, error: type[BaseException] = MemoryError) -> None:
        self.after, self.pack, self.error = after, pack, error
        self.packs, self.lines = 0, list[str]()

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def begin(self, label: str, rounds: int, done: int) -> None:
        self.packs += 1

    def advance(self, report: RoundReport) -> None:
        if self.packs == self.pack and report.round == self.after:
            raise self.error

    def say(self, text: str) -> None:
        self.lines.append(text)


class Press(Silent):
    """Ctrl-C while a round is trained; ``begun`` lists the packs that began."""

    def __init__(self, in_round: int) -> None:
        self.in_round, self.begun, self.said = in_round, list[str](), ""

    def begin(self, label: str, rounds: int, done: int) -> None:
        self.begun.append(label)

    def advance(self, report: RoundReport) -> None:
        # Still deferred here, as it is in the round itself.
        if report.round == self.in_round:
            signal.raise_signal(signal.SIGINT)

    def say(self, text: str) -> None:
        self.said = text
