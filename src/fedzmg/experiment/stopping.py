"""Early stopping: what a user may ask for, and what is written down when it is used.

Nothing is stopped unless a file says so. A trial that is stopped keeps the model it has, takes no
more part in its pack, and has a line that names the round and the reason.
"""

# ruff: noqa: RUF012 (pydantic copies mutable defaults)
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from fedzmg.errors import InputError
from fedzmg.experiment.specs.strict import Strict
from fedzmg.experiment.work.budget import Budget
from fedzmg.simulation import RoundReport
from fedzmg.storage.files import write_atomic

Why: TypeAlias = Literal["diverged", "cannot_win", "halving"]
NAME = "stopped.json"
FORMAT = 1


class StudyStop(Strict):
    """When a run of a study is trained no further; by default never."""

    diverged: bool = False
    """Train a run no further once it has diverged: its model is frozen and its score the worst
    there is anyway, so every score stays the same; only its traffic and its steps end."""


class GridStop(Strict):
    """When a point of a grid is trained no further; by default never."""

    diverged: bool = False
    """Train a trial no further once it has diverged: its model is frozen and its score the worst
    there is anyway, so no score and no choice changes."""
    cannot_win: bool = False
    """Train a point no further once its score cannot reach the best one any more, even if every
    evaluation to come had the best value possible. The choice stays the same: at the end every
    point that was stopped is compared with the best once more, and trained to the end if the best
    does not hold (because a better point diverged later)."""
    best_possible: float | None = None
    """The bound of the metric that ``cannot_win`` relies on: 1 for an accuracy; of any other metric
    it has to be said. A closer one stops sooner, and the choice is as sure as the bound is: once an
    evaluation is seen to pass it, what was stopped because of it is trained to the end."""
    heuristic_halving: list[int] = []
    """After each of these rounds the better half of the points still training goes on, by the
    metric after that round. A heuristic: a point that begins slowly and would win is lost."""


class Stopped(NamedTuple):
    """The decision to train a trial no further."""

    round: int
    """The last round that it trained; 0 if it never began."""
    why: Why
    words: str
    """The reason in words."""
    at_most: float | None = None
    """The score that it, or its point, could still have come to."""

    @property
    def heuristic(self) -> bool:
        """Whether the trial might have won."""
        return self.why == "halving"

    def line(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self._asdict(), "heuristic": self.heuristic}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Stopped:
        """What a line says.

        Raises:
            KeyError, TypeError, ValueError: if it lacks or garbles something.
        """
        if line["why"] not in get_args(Why):
            raise ValueError(f"unknown reason {line['why']!r}")
        bound = line.get("at_most")
        return cls(
            int(line["round"]), line["why"], str(line["words"]),
            None if bound is None else float(bound),
        )  # fmt: skip


class Verdict(NamedTuple):
    """What is to happen after a round."""

    end: bool = False
    """End the whole command cleanly: the time is over."""
    stopped: Mapping[int, Stopped] = {}
    """Trials to train no further, by their place in the simulation."""


Ask: TypeAlias = Callable[[RoundReport], Verdict]
"""Asked after every round."""


def asking(budget: Budget, *, diverged: bool = False) -> Ask:
    """The question of a study: is there time left, and which runs are frozen anyway."""

    def ask(report: RoundReport) -> Verdict:
        return Verdict(budget.spent, newly_diverged(report) if diverged else {})

    return ask


def newly_diverged(report: RoundReport) -> dict[int, Stopped]:
    """Trials that would go on training although they have diverged."""
    if report.round == report.simulation.rounds:
        return {}
    return {
        i: Stopped(report.round, "diverged", f"diverged in round {report.round}")
        for i, record in enumerate(report.records)
        if record.diverged and i not in report.simulation.stopped_trials
    }


def write(place: Path, stopped: Stopped) -> None:
    """Put a decision into a run directory."""
    text = json.dumps({"format": FORMAT, **stopped.line()}, allow_nan=False)
    write_atomic(place / NAME, f"{text}\n".encode())


def read(place: Path) -> Stopped | None:
    """The decision in a run directory, if there is one.

    Raises:
        InputError: if it cannot be read.
    """
    path = place / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r}, this version reads {FORMAT}")
        return Stopped.of(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore or remove it") from None
