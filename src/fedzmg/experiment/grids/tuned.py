"""Result of a hyper-parameter search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedzmg.experiment.grids.score import chosen_options, warnings
from fedzmg.results.formatting import aligned


@dataclass(frozen=True)
class Tuned:
    """Best options of every algorithm on a task; ``print`` shows them."""

    data: Mapping[str, Any] = field(repr=False)
    """Content of ``grid.json``: every point and its score."""

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Best options by algorithm, as ``compare(task, ..., settings=...)`` takes them."""
        found = self.data["algorithms"].items()
        return {name: chosen_options(name, entry, entry["best"]) for name, entry in found}

    @property
    def warnings(self) -> list[str]:
        """Warnings about these options: borders, algorithms that only diverged."""
        found = warnings(self.data)
        if self.data["selection"] == "test":
            found.append("chosen by the test set: a comparison on it is not an honest test")
        return found

    def __repr__(self) -> str:
        """Show the best options in a line."""
        points = (
            f"{name} {_point(entry['best'])}" for name, entry in self.data["algorithms"].items()
        )
        return f"<Tuned on {self.data['task']!r}: {'; '.join(points)}>"

    def __str__(self) -> str:
        """Show a table of the best points and the warnings."""
        data, entries = self.data, self.data["algorithms"]
        best = [entry["best"] for entry in entries.values()]
        columns = {
            "algorithm": list(entries),
            "best point": [_point(point) for point in best],
            data["metric"]: ["" if point is None else f"{point['score']:.4f}" for point in best],
            "points": [str(len(entry["points"])) for entry in entries.values()],
            "diverged": [
                str(sum(bool(point["diverged"]) for point in entry["points"]) or "")
                for entry in entries.values()
            ],
        }
        seeds = "1 seed" if len(data["seeds"]) == 1 else f"{len(data['seeds'])} seeds"
        what = "tuning" if data["selection"] == "tune" else "test"
        return "\n".join(
            [
                f"{data['task']}, {seeds}, {data['rounds']} rounds",
                "",
                aligned(columns, words=2),
                "",
                f"{data['metric']}: mean after the last {data['last']} rounds, on "
                f"{data['examples']:,} {what} examples",
                *self.warnings,
            ]
        )


def _point(best: Mapping[str, Any] | None) -> str:
    """Format a point.

    >>> _point({"options": {"client.lr": 0.1, "server.lr": 1.0}}), _point(None)
    ('client.lr 0.1, server.lr 1', 'none')
    """
    if best is None:
        return "none"
    return ", ".join(f"{key} {value:.4g}" for key, value in best["options"].items())
