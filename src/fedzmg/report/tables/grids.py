"""The table of a grid: the best point of every algorithm, its neighbours and what was lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedzmg.report.tables.sheet import NOTHING, Cell, Record, Sheet
from fedzmg.results.formatting import count_text, value_text
from fedzmg.results.grids import axes_of, name_of

_WORDS = {"cannot_win": "cannot win", "halving": "halving (heuristic)"}


def best_points(data: Mapping[str, Any]) -> Sheet:
    """A row per algorithm of a ``grid.json``."""
    entries = list(data["algorithms"].values())
    stopping = "stop" in data
    remarks = [_remark(entry["best"]) for entry in entries]
    heads = (
        "algorithm", "best point", "score", "neighbours", "diverged",
        *(("stopped",) if stopping else ()), *(("remark",) if any(remarks) else ()),
    )  # fmt: skip
    rows = []
    for entry, remark in zip(entries, remarks, strict=True):
        row = [Cell(str(entry["label"])), *_best(entry["best"], str(data["metric"]))]
        lost = _lost(entry)
        row.append(Cell(f"{lost} of {len(entry['points'])}", lost))
        row += [Cell(stopped_text(entry["stopped"]))] if stopping else []
        row += [Cell(remark)] if any(remarks) else []
        rows.append(row)
    axes = axes_of(data)
    records = [_record(entry, axes) for entry in entries]
    title = f"Best points of the grid on {name_of(data)}"
    return Sheet("grid", title, heads, rows, _caption(data), records, 2)


def _best(best: Mapping[str, Any] | None, metric: str) -> list[Cell]:
    """Point, score and neighbours."""
    if best is None:
        return [Cell("none"), NOTHING, NOTHING]
    point = ", ".join(f"{key} {value:.4g}" for key, value in best["options"].items())
    cells = [Cell(point), Cell(value_text(best["score"], metric), best["score"])]
    around = _around(best)
    if not around:
        return [*cells, NOTHING]
    low, high = value_text(min(around), metric), value_text(max(around), metric)
    return [*cells, Cell(f"{low.removesuffix(' %')} to {high}")]


def _around(best: Mapping[str, Any]) -> list[float]:
    return [one["score"] for one in best["neighbours"] if one["score"] is not None]


def _lost(entry: Mapping[str, Any]) -> int:
    return sum(bool(point["diverged"]) for point in entry["points"])


def _remark(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "all diverged"
    return "on the border" if best["border"] else ""


def stopped_text(counts: Mapping[str, int]) -> str:
    """How many trials were stopped and why, and what of the rounds was trained.

    >>> stopped_text({"diverged": 3, "halving": 4, "rounds": 30, "rounds_asked": 60})
    '3 diverged, 4 halving (heuristic); 50 % of the rounds trained'
    """
    why = [f"{n} {_WORDS.get(k, k)}" for k, n in _reasons(counts)]
    share = 100 * counts["rounds"] / counts["rounds_asked"]
    return f"{', '.join(why)}; {share:.0f} % of the rounds trained" if why else "-"


def stopped_count(counts: Mapping[str, int]) -> int:
    """How many trials were stopped, for any reason."""
    return sum(n for _, n in _reasons(counts))


def _reasons(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(why, n) for why, n in counts.items() if not why.startswith("rounds")]


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
    if _same_by_test(data):
        parts.append("the whole test set chooses the same")
    return "; ".join(parts) + "."


def _same_by_test(data: Mapping[str, Any]) -> bool:
    """Whether all test examples were asked, too, and choose as the tuning half does."""
    pairs = [(e["best"], e.get("best_by_test")) for e in data["algorithms"].values()]
    return all(a is not None and b is not None and a["options"] == b["options"] for a, b in pairs)


def _record(entry: Mapping[str, Any], axes: list[str]) -> Record:
    best = entry["best"]
    around = [] if best is None else _around(best)
    by_test = entry.get("best_by_test")
    return {
        "algorithm": str(entry["label"]),
        **{axis: None if best is None else best["options"].get(axis) for axis in axes},
        "score": None if best is None else best["score"],
        "neighbours_low": min(around, default=None),
        "neighbours_high": max(around, default=None),
        "border": None if best is None else " ".join(best["border_axes"]),
        "points": len(entry["points"]),
        "diverged": _lost(entry),
        "score_by_test": None if by_test is None else by_test["score"],
        **{
            f"{axis}_by_test": None if by_test is None else by_test["options"].get(axis)
            for axis in axes
        },
    }
