"""What became of what was trained again: every bit the same, or where it first differs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fedzmg.engine.choose import can_compile
from fedzmg.errors import InputError
from fedzmg.experiment.runs import rules
from fedzmg.simulation import resolve_device
from fedzmg.storage.formats import json_words
from fedzmg.tasks.task import Task

NUMBERS = ("metric", "loss", "train_loss")
UNTOLD = ("started", "finished", "engine_reason", "command", "chunk_changes", "pack_changes")
"""Facts of a manifest that say nothing about where a run's bits come from; on a processor, who
trained beside it does not, either."""


class Fact(NamedTuple):
    """A circumstance that is not what it was."""

    name: str
    then: Any
    now: Any


@dataclass(frozen=True)
class Verdict:
    """What became of one run, or of the grid of one algorithm."""

    name: str
    rounds: int
    """Rounds that were trained again and compared."""
    first: int | None
    """The first round with a difference."""
    fields: tuple[str, ...]
    """What differs there, times apart."""
    size: float | None
    """Largest absolute difference of metric and losses in all of these rounds."""
    facts: tuple[Fact, ...]
    note: str = ""

    @property
    def reproduced(self) -> bool:
        """Whether every bit is the same."""
        return self.rounds > 0 and self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **vars(self),
            "size": json_words(self.size),
            "facts": [fact._asdict() for fact in self.facts],
            "reproduced": self.reproduced,
        }


class Compared(NamedTuple):
    """Numbers of one round, as they were logged and as they are now."""

    round: int
    then: Mapping[str, Any]
    now: Mapping[str, Any]


def judge(
    name: str,
    pairs: Iterable[Compared],
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    note: str,
) -> Verdict:
    """The verdict on rounds in their order.

    Args:
        name: of what was trained again.
        pairs: the rounds, several of one number where several trials are judged together.
        then: the manifest.
        now: what the manifest would say now.
        note: what a reader has to know.
    """
    first: int | None = None
    fields: tuple[str, ...] = ()
    size = 0.0
    seen: set[int] = set()
    for round_, old, new in pairs:
        seen.add(round_)
        unequal = tuple(
            key for key in new if key != "seconds" and not _same(old.get(key), new[key])
        )
        if unequal and first is None:
            first, fields = round_, unequal
        for key in NUMBERS:
            size = max(size, _distance(old.get(key), new[key]))
    untold = [*UNTOLD, *(["pack"] if then.get("device") == now.get("device") == "cpu" else [])]
    untold += ["chunk"] if then.get("chunk") is None else []  # all at once, which it still is
    facts = tuple(
        Fact(key, then[key], value)
        for key, value in now.items()
        if key in then and key not in untold and then[key] != value
    )
    return Verdict(name, len(seen), first, fields, size if seen else None, facts, note)


def _same(old: Any, new: Any) -> bool:
    # What an older version did not log cannot differ.
    return old == new or str(old) == str(new) or (old is None and isinstance(new, tuple))


def _distance(old: float | None, new: float | None) -> float:
    if old is None or new is None or _same(old, new):
        return 0.0
    return abs(old - new) if math.isfinite(old - new) else math.inf


def other_data(name: str, task: Task, facts: Mapping[str, Any]) -> Verdict | None:
    """The verdict if a task is not what it was then; None if it is."""
    data = {"data_sha256": task.train.fingerprint(), "task_sha256": task.fingerprint()}
    moved = [
        Fact(key, facts[key], now)
        for key, now in data.items()
        if key in facts and facts[key] != now
    ]
    note = f"{task.name!r} holds other data, model or metric than then: nothing was trained"
    return Verdict(name, 0, None, (), None, tuple(moved), note) if moved else None


def remarks(facts: Mapping[str, Any]) -> list[str]:
    """What keeps bits from being the same whatever the machine."""
    notes = []
    since = [change["round"] for change in facts.get(rules.CHANGES, [])]
    if since:
        notes.append(f"its rules changed while it trained, first in round {min(since)}")
    if os.environ.get("OMP_NUM_THREADS", str(facts.get("threads"))) != str(facts.get("threads")):
        notes.append("OMP_NUM_THREADS is set, which may keep the recorded threads from working")
    if facts.get("device") == "cuda" and not facts.get("deterministic"):
        notes.append("trained without deterministic = true, so a GPU promises no bits")
    return notes


@contextlib.contextmanager
def circumstances(name: str, facts: Mapping[str, Any]) -> Iterator[torch.device]:
    """The recorded device and number of threads, as far as this machine has them.

    Raises:
        InputError: if there is no such device, or no compiler for it.
    """
    kind = str(facts.get("device", "cpu"))
    try:
        device = resolve_device(kind)
    except InputError:
        raise InputError(
            f"{name} was trained on a GPU ({facts.get('device_name')}), and there is none "
            "here: verify it where there is one"
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
