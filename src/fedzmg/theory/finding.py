"""Findings: numbers predicted and measured, and the verdict that follows from them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

Rule: TypeAlias = Literal["near", "relative", "at most", "at least"]
Basis: TypeAlias = Literal["derived", "claim", "not claimed"]
Series: TypeAlias = dict[str, tuple[Sequence[float], Sequence[float]]]  # curves by name: x and y


class Size(NamedTuple):
    """Amount of computation; smaller is faster and coarser."""

    repetitions: int = 200
    steps: int = 5_000
    problems: int = 300
    samples: int = 200_000
    rounds: int = 6  # training rounds of the small networks


FULL = Size()
QUICK = Size(repetitions=60, steps=2_500, problems=60, samples=40_000, rounds=2)


class Value(NamedTuple):
    """One number, predicted and measured."""

    what: str
    predicted: float
    measured: float
    tolerance: float
    rule: Rule = "near"
    basis: Basis = "derived"  # by us; or claimed by the paper; or expected, but not claimed

    @property
    def agrees(self) -> bool:
        """True if the measured number is as predicted; False for NaN."""
        off = self.measured - self.predicted
        if self.rule == "at most":
            return off <= self.tolerance
        if self.rule == "at least":
            return off >= -self.tolerance
        room = self.tolerance * (abs(self.predicted) if self.rule == "relative" else 1.0)
        return abs(off) <= room


@dataclass
class Finding:
    """Result of one check."""

    id: str
    title: str
    claim: str
    remedy: str = ""  # condition under which the claim holds, if not as printed
    setting: str = ""
    lines: list[Value] = field(default_factory=list)
    series: Series = field(default_factory=dict)

    def add(
        self, what: str, predicted: float, measured: Tensor | float, tolerance: float = 0.0,
        rule: Rule = "near", *, basis: Basis = "derived",
    ) -> None:  # fmt: skip
        """Add a number; against a bound, the largest or smallest one of a tensor."""
        if isinstance(measured, Tensor) and rule == "at most":
            measured = measured.max()
        elif isinstance(measured, Tensor) and rule == "at least":
            measured = measured.min()
        self.lines.append(Value(what, predicted, float(measured), tolerance, rule, basis))

    at_most = functools.partialmethod(add, rule="at most")
    at_least = functools.partialmethod(add, rule="at least")

    def zero(
        self, what: str, measured: Tensor | float, tolerance: float, *, basis: Basis = "derived"
    ) -> None:
        """Add a number that should be zero: the largest magnitude of a tensor."""
        found = measured.abs().max() if isinstance(measured, Tensor) else measured
        self.add(what, 0.0, found, tolerance, basis=basis)

    @property
    def verdict(self) -> str:
        """Say whether the claim holds, fails as stated or is not covered; and the remedy.

        Derived numbers must all agree. Otherwise our derivation is wrong, the verdict is
        ``not reproduced``, and nothing follows for the paper.
        """
        wrong = {line.basis for line in self.lines if not line.agrees}
        if not wrong or "derived" in wrong:
            return "not reproduced" if wrong else "holds"
        verdict = "fails as stated" if "claim" in wrong else "not covered by the paper"
        return f"{verdict}; holds {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        texts = ("id", "title", "claim", "setting", "verdict")
        return {name: getattr(self, name) for name in texts} | {
            "lines": [{**line._asdict(), "agrees": line.agrees} for line in self.lines],
            "series": {name: [list(x), list(y)] for name, (x, y) in self.series.items()},
        }


Check: TypeAlias = Callable[[Size], Finding]
REGISTERED: dict[str, Check] = {}
_NO_CLAIM = "not shown, as python -OO removes docstrings; see docs/theory.md"


def check(id: str, title: str) -> Callable[[Callable[[Size, Finding], None]], Check]:
    """Register a function that fills in a finding; its docstring is the claim."""

    def register(fill: Callable[[Size, Finding], None]) -> Check:
        claim = " ".join((fill.__doc__ or _NO_CLAIM).split()).removesuffix(".")

        @functools.wraps(fill)
        def run(size: Size) -> Finding:
            finding = Finding(id, title, claim)
            fill(size, finding)
            return finding

        REGISTERED[id] = run
        return run

    return register
