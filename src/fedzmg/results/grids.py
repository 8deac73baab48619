"""Name, axes and score tables of a grid search, from its ``grid.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedzmg.results import paper
from fedzmg.results.grouping import Study


def name_of(data: Mapping[str, Any]) -> str:
    """Return the name of a grid: its task, and its label if it has one."""
    task = paper.shown(str(data["task"]))
    return f"{task}, {data['label']}" if data.get("label") else task


def axes_of(data: Mapping[str, Any]) -> list[str]:
    """Return the options that any algorithm of a grid is searched over, in order."""
    return list(
        dict.fromkeys(axis for entry in data["algorithms"].values() for axis in entry["axes"])
    )


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
    keys = list(axes)
    columns = keys[0]
    rows = keys[1] if len(keys) > 1 else ""
    row_values = list(axes[rows]) if rows else [0.0]
    shape = (len(row_values), len(axes[columns]))
    worst = -math.inf if higher_is_better else math.inf
    scores = np.full(shape, worst)
    diverged = np.ones(shape, dtype=bool)
    stopped = np.zeros(shape, dtype=bool)
    for point in entry["points"]:
        where = (
            row_values.index(point["options"][rows]) if rows else 0,
            axes[columns].index(point["options"][columns]),
        )
        value = point["score"]
        if not point["diverged"]:
            diverged[where] = False
        stopped[where] |= value is None and "stopped" in point
        if value is not None and (value > scores[where]) == higher_is_better:
            scores[where] = value
    stopped &= ~np.isfinite(scores)
    values = row_values, list(axes[columns])
    return Field(rows, columns, *values, scores, diverged & ~stopped, keys[2:], stopped)


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
