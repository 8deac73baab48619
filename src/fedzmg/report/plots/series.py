"""The runs of one algorithm, averaged for a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Series:
    """The runs of one algorithm.

    Attributes:
        label: Name shown in the figure.
        rounds: Strictly increasing round indices of the evaluations.
        runs: Values ``[runs, evaluations]``; a run that holds a non-finite value has diverged.
    """

    label: str
    rounds: NDArray[Any]
    runs: NDArray[Any]

    def __post_init__(self) -> None:
        """Raise ValueError if the arrays do not belong together."""
        if self.rounds.ndim != 1 or self.rounds.size == 0:
            raise ValueError(
                f"rounds of {self.label!r} must be a non-empty list, "
                f"got the shape {self.rounds.shape}"
            )
        if np.any(np.diff(self.rounds) <= 0):
            raise ValueError(f"rounds of {self.label!r} must strictly increase")
        if self.runs.ndim != 2 or len(self.runs) == 0 or self.runs.shape[1] != len(self.rounds):
            raise ValueError(
                f"runs of {self.label!r} must have the shape [runs, {len(self.rounds)}], "
                f"got {self.runs.shape}"
            )


@dataclass(frozen=True, eq=False)
class Average:
    """What is drawn of a series.

    Attributes:
        label: Name shown in the figure, with what has to be known about the curve.
        rounds: Where there is a value.
        mean: Over runs.
        spread: Sample standard deviation; None for one run.
        averaged: Number of runs.
        broke_off: Whether every run diverged, so that the curve ends early.
    """

    label: str
    rounds: NDArray[Any]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None
    averaged: int
    broke_off: bool


def average(series: Series | Average) -> Average:
    """Average the finite runs of a series and count the others in its label."""
    if isinstance(series, Average):
        return series
    runs = np.asarray(series.runs, dtype=np.float64)
    finite = np.isfinite(runs)
    completed = finite.all(axis=1)
    diverged = int(np.count_nonzero(~completed))
    label, rounds = series.label, series.rounds
    if completed.any():
        runs = runs[completed]
        if diverged:
            label = f"{label} ({diverged} diverged)"
    else:
        shared = int(np.argmin(finite.all(axis=0)))
        rounds, runs = rounds[:shared], runs[:, :shared]
        label = f"{label} (diverged)" if diverged == 1 else f"{label} (all {diverged} diverged)"
    spread = runs.std(axis=0, ddof=1) if len(runs) > 1 else None
    return Average(label, rounds, runs.mean(axis=0), spread, len(runs), not completed.any())
