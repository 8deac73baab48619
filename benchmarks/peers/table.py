"""Summarise the peers' reports: medians, ratios, and checks of equal work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peers.work import Arrays, count

TOLERANCE = {"float32": 0.05, "tf32": 0.1}
"""Largest relative difference of one round's update from the plain loop's. Units that
the last bit switches on or off move a client of the CNN by up to 0.02 in float32, against float64
too; one step of 25 left out moves it by 0.09 to 0.16."""


@dataclass
class Outcome:
    """Results of one peer."""

    title: str
    turns: list[list[float]] = field(default_factory=list)
    """Milliseconds of the rounds that count, a list for every turn."""
    cold_seconds: list[float] = field(default_factory=list)
    """From the start of the process to the end of its first round."""
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""
    difference: float | None = None
    """Relative difference of the first round's update from the plain loop's."""
    loss: tuple[float, float] | None = None
    """Before the first round and after the last, on the last round's examples."""
    failure: str | None = None

    def add(self, report: Mapping[str, Any], *, began: float, warm_up: int) -> None:
        """Add the report of one turn, without its first rounds."""
        self.turns.append([1e3 * s for s in report["seconds"][warm_up:]])
        self.cold_seconds.append(report["first_done"] - began)
        self.versions, self.note = dict(report["versions"]), report["note"]

    @property
    def round_ms(self) -> float:
        """Median over turns of their median rounds."""
        return statistics.median(statistics.median(turn) for turn in self.turns)


def times_slower(slow: Outcome, fast: Outcome) -> float:
    """Median ratio of two peers' median rounds, turn by turn: a busy hour slows both."""
    pairs = zip(slow.turns, fast.turns, strict=False)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def distance(model: Arrays, reference: Arrays, start: Arrays) -> float:
    """Distance of two models, relative to the way that the reference has come."""
    return _norm(model, reference) / _norm(reference, start)


def _norm(a: Arrays, b: Arrays) -> float:
    squares = (np.square(np.subtract(a[name], b[name], dtype=np.float64)).sum() for name in b)
    return float(np.sqrt(sum(squares)))


def doubts(
    report: Mapping[str, Any], last: Arrays, start: Arrays, *, steps: int, rounds: int
) -> list[str]:
    """Ways in which a peer did not do the work, by its own count and by its last model."""
    found = []
    if report["steps"] != [steps] * rounds:
        found.append(f"local steps per round {report['steps']}, expected {steps} x {rounds}")
    if {k: v.shape for k, v in last.items()} != {k: v.shape for k, v in start.items()}:
        found.append(f"{count(last):,} parameters, expected {count(start):,}, or other shapes")
    elif not all(np.isfinite(v).all() for v in last.values()):
        found.append("the model is not finite")
    elif any(np.array_equal(last[name], start[name]) for name in start):
        found.append("a part of the model has not moved")
    return found


def rows(
    outcomes: Sequence[Outcome], plain: Outcome, ours: Outcome, steps: int
) -> list[dict[str, Any]]:
    """Build the table as values, without numbers that need a failed peer."""
    found: list[dict[str, Any]] = []
    for outcome in outcomes:
        row: dict[str, Any] = {"peer": outcome.title}
        if outcome.failure is not None or not outcome.turns:
            found.append({**row, "failure": outcome.failure or "did not run"})
            continue
        row["round_ms"] = outcome.round_ms
        row["steps_per_second"] = 1e3 * steps / outcome.round_ms
        if plain.turns and plain.failure is None:
            row["faster_than_plain"] = times_slower(plain, outcome)
        if ours.turns and ours.failure is None:
            row["slower_than_fedzmg"] = times_slower(outcome, ours)
        row["cold_seconds"] = statistics.median(outcome.cold_seconds)
        row["difference"] = outcome.difference
        row["loss"] = outcome.loss
        row["versions"], row["note"] = outcome.versions, outcome.note
        row["ms_of_turns"] = [statistics.median(turn) for turn in outcome.turns]
        found.append(row)
    return found


COLUMNS = (
    ("ms/round", "round_ms", "{:.1f}"),
    ("steps/s", "steps_per_second", "{:,.0f}"),
    ("speed/plain", "faster_than_plain", "{:.2f}"),
    ("time/fedzmg", "slower_than_fedzmg", "{:.2f}"),
    ("cold s", "cold_seconds", "{:.1f}"),
    ("extrapolated s", "extrapolated_seconds", "{:.0f}"),
    ("update off by", "difference", "{:.0e}"),
)


def render(table: Sequence[Mapping[str, Any]]) -> str:
    """Format the table; a failed peer is a line with the reason."""
    lines = ["  ".join([f"{'':<18}", *(title for title, _, _ in COLUMNS)])]
    for row in table:
        if "failure" in row:
            lines.append(f"{row['peer']:<18}  {row['failure']}")
            continue
        cells = [
            (form.format(row[key]) if row.get(key) is not None else "-").rjust(len(title))
            for title, key, form in COLUMNS
        ]
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append("  ".join([f"{row['peer']:<18}", *cells, f"{versions}; {row['note']}"]))
    return "\n".join(lines)
