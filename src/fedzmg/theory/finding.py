"""Findings: numbers predicted and measured, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Rule: TypeAlias = Literal["near", "relative", "at most", "at least"]
Series: TypeAlias = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Curves by name: x and y."""

HOLDS, FAILS, DISAGREES = "holds", "fails as stated", "not reproduced"


class Size(NamedTuple):
    """Amount of computation; smaller is faster and coarser."""

    repetitions: int = 200
    steps: int = 20_000
    problems: int = 300
    samples: int = 200_000
    rounds: int = 12
    """Training rounds of the small networks."""


FULL = Size()
QUICK = Size(repetitions=60, steps=2_500, problems=60, samples=40_000, rounds=2)


class Value(NamedTuple):
    """One number, predicted and measured."""

    what: str
    predicted: float
    measured: float
    tolerance: float
    rule: Rule = "near"
    stated: bool = False
    """True for the paper's claim as printed, False for our derivation."""

    @property
    def agrees(self) -> bool:
        """True if the measured number is as predicted; False for NaN.

        >>> Value("a length", 2.0, 2.1, 0.1, "relative").agrees
        True
        >>> Value("a bound", 0.0, 2.25, 0.0, "at most").agrees
        False
        """
        off = self.measured - self.predicted
        if self.rule == "at most":
            return off <= self.tolerance
        if self.rule == "at least":
            return off >= -self.tolerance
        room = self.tolerance * (abs(self.predicted) if self.rule == "relative" else 1.0)
        return abs(off) <= room


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    id: str
    title: str
    claim: str
    """Tested claim, in words."""
    setting: str
    lines: tuple[Value, ...]
    remedy: str = ""
    """Condition under which the claim holds, if it fails as printed."""
    series: Series = field(default_factory=dict)
    """Curves for a figure."""

    @property
    def verdict(self) -> str:
        """``holds``, ``fails as stated``, ``holds under ...``, or ``not reproduced``.

        The paper's own numbers decide whether the claim holds. Derived numbers must all agree;
        otherwise our derivation is wrong and gives no verdict on the paper.
        """
        if not all(line.agrees for line in self.lines if not line.stated):
            return DISAGREES
        if all(line.agrees for line in self.lines):
            return HOLDS
        return f"{FAILS}; holds {self.remedy}" if self.remedy else FAILS

    @property
    def reproduced(self) -> bool:
        """True if every derived number agrees with its measurement."""
        return self.verdict != DISAGREES

    def as_dict(self) -> dict[str, Any]:
        """Convert for JSON."""
        return {
            "id": self.id,
            "title": self.title,
            "claim": self.claim,
            "setting": self.setting,
            "verdict": self.verdict,
            "lines": [{**line._asdict(), "agrees": line.agrees} for line in self.lines],
            "series": {name: [list(x), list(y)] for name, (x, y) in self.series.items()},
        }
