"""Name, axes and score tables of a grid search, from its ``grid.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.results import paper
from fedzmg.results.grouping import Study


def name_of(data: Mapping[str, Any]) -> str:
    """Return the name of a grid: its task, and its label if it has one."""
    return ", ".join(filter(None, [paper.shown(str(data["task"])), data.get("label")]))


def axes_of(data: Mapping[str, Any]) -> list[str]:
    """Return the options that any algorithm of a grid is searched over, in order."""
    return list(dict.fromkeys(axis for one in data["algorithms"].values() for axis in one["axes"]))


class Field(NamedTuple):
    """Scores of an algorithm over two axes of a grid."""

    rows: str
    """Option of the vertical axis; empty if there is one axis only."""
    columns: str
    row_values: list[float]
    column_values: list[float]
    scores: NDArray[np.float64]
    """Scores ``[rows, columns]``; the best over further axes."""
    diverged: NDArray[np.bool_]
    others: list[str]
    """Axes that are not shown."""
    stopped: NDArray[np.bool_]
    """True where no trial was trained to its end, so that there is no score."""

    def position(self, options: Mapping[str, float]) -> tuple[int, int]:
        """Return row and column of a point."""
        row = self.row_values.index(options[self.rows]) if self.rows else 0
        return row, self.column_values.index(options[self.columns])


def field(entry: Mapping[str, Any], *, higher_is_better: bool = True) -> Field:
    """Arrange the scores of an algorithm over its first two axes: server up, client across."""
    axes: Mapping[str, list[float]] = entry["axes"]
    columns, rows, *others = [*axes, ""] if len(axes) == 1 else axes
    shape = len(axes.get(rows, [0.0])), len(axes[columns])
    found = Field(
        rows,
        columns,
        list(axes.get(rows, [0.0])),
        list(axes[columns]),
        np.full(shape, -np.inf if higher_is_better else np.inf),
        np.ones(shape, dtype=bool),
        others,
        np.zeros(shape, dtype=bool),
    )
    better = max if higher_is_better else min
    for point in entry["points"]:
        at, score = found.position(point["options"]), point["score"]
        found.diverged[at] &= bool(point["diverged"])
        found.stopped[at] |= score is None and "stopped" in point
        if score is not None:
            found.scores[at] = better(score, found.scores[at])
    found.stopped[np.isfinite(found.scores)] = False
    found.diverged[found.stopped] = False
    return found


def limits_of(fields: Sequence[Field]) -> tuple[float, float]:
    """Return the lowest and highest score of several algorithms, for one scale of colours."""
    shown = [f.scores[~f.diverged & np.isfinite(f.scores)] for f in fields]
    values = np.concatenate(shown) if shown else np.array([])
    return (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)


def on_the_border(study: Study, grids: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the axes on whose border the chosen point of a study's algorithm lies, by label.

    A grid on the same task counts for an algorithm whose runs have the options it chose.
    """
    found: dict[str, list[str]] = {}
    for grid in (one for one in grids if one["task"] == study.task):
        for entry in grid["algorithms"].values():
            runs = study.members.get(str(entry["label"]), ())
            for best in filter(None, (entry["best"], entry.get("best_by_test"))):
                used = runs and best["options"].items() <= runs[0].variant.items()
                if used and best["border"]:
                    found[str(entry["label"])] = list(best["border_axes"])
    return found
