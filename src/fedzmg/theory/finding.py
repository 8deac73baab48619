"""What a check comes to: numbers predicted and measured, and the verdict that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Rule: TypeAlias = Literal["near", "relative", "at most", "at least"]
Series: TypeAlias = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Curves by name: where, and how high."""

HOLDS, FAILS, DISAGREES = "holds", "fails as stated", "not reproduced"


class Size(NamedTuple):
    """How much is computed; smaller is faster and coarser."""

    repetitions: int = 200
    steps: int = 20_000
    problems: int = 300
    samples: int = 200_000
    rounds: int = 12
    """Of the small networks."""


FULL = Size()
QUICK = Size(repetitions=60, steps=2_500, problems=60, samples=40_000, rounds=2)


class Line(NamedTuple):
    """One number, predicted and measured."""

    what: str
    predicted: float
    measured: float
    tolerance: float
    rule: Rule = "near"
    stated: bool = False
    """Whether this is the paper's claim as it is printed; otherwise it is what we derive."""

    @property
    def agrees(self) -> bool:
        """Whether the measured number is what was predicted; never for one that is not a number.

        >>> Line("a length", 2.0, 2.1, 0.1, "relative").agrees
        True
        >>> Line("a bound", 0.0, 2.25, 0.0, "at most").agrees
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
    """The outcome of one check."""

    id: str
    title: str
    claim: str
    """What is tested, in words."""
    setting: str
    lines: tuple[Line, ...]
    remedy: str = ""
    """Under what the claim holds, for one that does not hold as it is printed."""
    series: Series = field(default_factory=dict)
    """Curves for a figure."""

    @property
    def verdict(self) -> str:
        """``holds``, ``fails as stated``, ``holds under ...``, or ``not reproduced``.

        The paper's own lines decide whether the claim holds as it stands. Lines that we derive must
        all agree: otherwise our account is wrong, and no verdict on the paper is given.
        """
        if not all(line.agrees for line in self.lines if not line.stated):
            return DISAGREES
        if all(line.agrees for line in self.lines):
            return HOLDS
        return f"{FAILS}; holds {self.remedy}" if self.remedy else FAILS

    @property
    def reproduced(self) -> bool:
        """Whether everything that we derive agrees with what was measured."""
        return self.verdict != DISAGREES

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "id": self.id,
            "title": self.title,
            "claim": self.claim,
            "setting": self.setting,
            "verdict": self.verdict,
            "lines": [{**line._asdict(), "agrees": line.agrees} for line in self.lines],
            "series": {name: [list(x), list(y)] for name, (x, y) in self.series.items()},
        }
