"""The table of a grid: best point of every algorithm, its neighbours and failed trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results.formatting import count_text, value_text
from fedzmg.results.grids import axes_of, name_of

_REASONS = {"cannot_win": "cannot win", "halving": "halving (heuristic)"}


def best_points(data: Mapping[str, Any]) -> Table:
    """Make a row per algorithm of a ``grid.json``."""
    entries, stopping = list(data["algorithms"].values()), "stop" in data
    remarks = [_remark(entry["best"]) for entry in entries]
    heads = (
        "algorithm", "best point", "score", "neighbours", "diverged",
        *["stopped"] * stopping, *["remark"] * any(remarks),
    )  # fmt: skip
    rows = []
    for entry, remark in zip(entries, remarks, strict=True):
        diverged = _diverged(entry)
        row = [Cell(str(entry["label"])), *_best(entry["best"], str(data["metric"]))]
        row.append(Cell(f"{diverged} of {len(entry['points'])}", diverged))
        row += [Cell(stopped_text(entry["stopped"]), None, "words")] if stopping else []
        row += [Cell(remark, None, "words")] if any(remarks) else []
        rows.append(row)
    axes = axes_of(data)
    records = [_record(entry, axes) for entry in entries]
    title = f"Best points of the grid on {name_of(data)}"
    return Table("grid", title, heads, rows, _caption(data), records)


def _best(best: Mapping[str, Any] | None, metric: str) -> list[Cell]:
    """Show point, score and neighbours."""
    if best is None:
        return [Cell("none", None, "words"), NOTHING, NOTHING]
    point = ", ".join(f"{key} {value:.4g}" for key, value in best["options"].items())
    cells = [Cell(point, None, "words"), Cell(value_text(best["score"], metric), best["score"])]
    around = _neighbours(best)
    if not around:
        return [*cells, NOTHING]
    low, high = value_text(min(around), metric), value_text(max(around), metric)
    return [*cells, Cell(f"{low.removesuffix(' %')} to {high}")]


def _neighbours(best: Mapping[str, Any]) -> list[float]:
    return [one["score"] for one in best["neighbours"] if one["score"] is not None]


def _diverged(entry: Mapping[str, Any]) -> int:
    return sum(bool(point["diverged"]) for point in entry["points"])


def _remark(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "all diverged"
    return "on the border" if best["border"] else ""


def stopped_text(counts: Mapping[str, int]) -> str:
    """Count early-stopped trials by reason, and the share of the rounds that was trained.

    >>> stopped_text({"diverged": 3, "halving": 4, "rounds": 30, "rounds_asked": 60})
    '3 diverged, 4 halving (heuristic); 50 % of the rounds trained'
    """
    why = [f"{n} {_REASONS.get(k, k)}" for k, n in counts.items() if not k.startswith("rounds")]
    share = 100 * counts["rounds"] / counts["rounds_asked"]
    return f"{', '.join(why)}; {share:.0f} % of the rounds trained" if why else "-"


def _caption(data: Mapping[str, Any]) -> str:
    half = "the tuning half" if data["selection"] == "tune" else "the whole test set"
    parts = [
        f"Score: {data['metric']} on {half} ({count_text(data['examples'], 'example')}), mean of "
        f"the last {data['last']} of {data['rounds']} rounds over "
        f"{count_text(len(data['seeds']), 'seed')}",
        "neighbours: one step away",
        "diverged points count 0",
    ]
    if "stop" in data:
        parts.append("stopped: trained no further, see stopped.jsonl")
    pairs = [(e["best"], e.get("best_by_test")) for e in data["algorithms"].values()]
    if all(a is not None and b is not None and a["options"] == b["options"] for a, b in pairs):
        parts.append("the whole test set chooses the same")
    return "; ".join(parts) + "."


def _record(entry: Mapping[str, Any], axes: list[str]) -> Record:
    best, by_test = entry["best"], entry.get("best_by_test") or {"options": {}, "score": None}
    around = [] if best is None else _neighbours(best)
    return {
        "algorithm": str(entry["label"]),
        **{axis: None if best is None else best["options"].get(axis) for axis in axes},
        "score": None if best is None else best["score"],
        "neighbours_low": min(around, default=None),
        "neighbours_high": max(around, default=None),
        "border": None if best is None else " ".join(best["border_axes"]),
        "points": len(entry["points"]),
        "diverged": _diverged(entry),
        "score_by_test": by_test["score"],
        **{f"{axis}_by_test": by_test["options"].get(axis) for axis in axes},
    }
