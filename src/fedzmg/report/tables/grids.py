"""The table of a grid: best point of every algorithm, its neighbours and failed trials."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedzmg.report.tables.table import Cell, Column, Table, words
from fedzmg.results.formatting import count_text, options_text, range_text, value_text
from fedzmg.results.reading import axes_of, name_of

Entry = Mapping[str, Any]


def best_points(data: Mapping[str, Any]) -> Table:
    """Make a row per algorithm of a ``grid.json``."""
    metric, entries = str(data["metric"]), list(data["algorithms"].values())
    stopping, shown = any("stopped" in e for e in entries), partial(value_text, metric=metric)
    nothing: dict[str, Any] = {"options": {}, "score": None}
    remarked = any(entry["best"] is None or entry["best"]["border"] for entry in entries)

    def remark(entry: Entry) -> Cell:
        lost = entry["best"] is None
        return words("all diverged" if lost else "on the border" * entry["best"]["border"])

    def neighbours(entry: Entry) -> str | None:
        found = _neighbours(entry["best"])
        span = range_text(min(found), max(found), metric, signed=False) if found else None
        return value_text(found[0], metric) if len(found) == 1 else span

    def diverged(entry: Entry) -> Cell:
        number = sum(bool(point["diverged"]) for point in entry["points"])
        return Cell(f"{number} of {len(entry['points'])}", number)

    def option(best: str, axis: str) -> Column:
        key = axis if best == "best" else f"{axis}_by_test"
        return Column("", key, lambda e: (e.get(best) or nothing)["options"].get(axis))

    def soonest(entry: Entry, i: int) -> Cell:
        one = entry["soonest"][i]
        options = options_text(one.get("options", {}))
        return words(f"{options} (round {one['round']})" if options else "never", one.get("round"))

    firsts = [one["threshold"] for one in entries[0].get("soonest", ())] if entries else []
    columns = [
        Column("algorithm", "algorithm", lambda e: str(e["label"])),
        Column("best point", "",
               lambda e: words(options_text((e["best"] or nothing)["options"]) or "none")),
        *(option("best", axis) for axis in axes_of(data)),
        Column("score", "score", lambda e: (e["best"] or nothing)["score"], shown),
        Column("neighbours", "", neighbours),
        Column("", "neighbours_low", lambda e: min(_neighbours(e["best"]), default=None)),
        Column("", "neighbours_high", lambda e: max(_neighbours(e["best"]), default=None)),
        Column("", "border", lambda e: e["best"] and " ".join(e["best"]["border_axes"])),
        Column("", "points", lambda e: len(e["points"])),
        Column("diverged", "diverged", diverged),
        Column("", "score_by_test", lambda e: (e.get("best_by_test") or nothing)["score"]),
        *(option("best_by_test", axis) for axis in axes_of(data)),
        *(
            Column(f"first to {shown(value)}", f"first_to_{value:g}", partial(soonest, i=i))
            for i, value in enumerate(firsts)
        ),
        Column("stopped" * stopping, "", lambda e: words(stopped_text(e["stopped"]))),
        Column("remark" * remarked, "", remark),
    ]  # fmt: skip
    half = "the tuning half" if data["selection"] == "tune" else "the whole test set"
    caption = (
        f"Score: {metric} on {half} ({count_text(data['examples'], 'example')}), mean of the last "
        f"{data['last']} of {data['rounds']} rounds over {count_text(len(data['seeds']), 'seed')}; "
        "neighbours: one step away; diverged points count 0"
    )
    caption += "; stopped: trained no further, see stopped.jsonl" * stopping
    pairs = [(e["best"], e.get("best_by_test")) for e in entries]
    if all(a is not None and b is not None and a["options"] == b["options"] for a, b in pairs):
        caption += "; the whole test set chooses the same"
    title = f"Best points of the grid on {name_of(data)}"
    return Table.build("grid", title, columns, entries, f"{caption}.")


def _neighbours(best: Mapping[str, Any] | None) -> list[float]:
    around = () if best is None else best["neighbours"]
    return [one["score"] for one in around if one["score"] is not None]


def stopped_text(counts: Mapping[str, int]) -> str:
    """Count early-stopped trials by reason, and the share of the rounds that was trained."""
    why = [f"{n} {k}" for k, n in counts.items() if not k.startswith("rounds")]
    share = 100 * counts["rounds"] / counts["rounds_asked"]
    return f"{', '.join(why)}; {share:.0f} % of the rounds trained" if why else "-"
