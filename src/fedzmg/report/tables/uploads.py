"""The table of clients whose uploads were rejected or flagged."""

import math
from collections.abc import Sized
from typing import Any

from fedzmg.report.tables.table import Cell, Column, Table, words
from fedzmg.results.study_result import StudyResult

MOST_ROWS, MOST_ROUNDS = 50, 8  # clients, and rounds of each, that the table names at most
CAPTION = (
    "Uploads that are not finite are rejected. An update whose norm is above 100 times the "
    "median of its cohort is flagged, or rejected with federation.guard = true; largest: that "
    "norm over the median"
)


def uploads(result: StudyResult) -> Table | None:
    """Make the table of unusual uploads, flagged ones first; None if there are none."""
    study = result.study
    items = [
        (label, run.seed, client)
        for label, runs in study.members.items()
        for run in runs
        for client in run.unusual
    ]
    if not items:
        return None
    items.sort(key=lambda item: (not item[2].flagged, -item[2].ratio))

    def rounds(item: Any) -> Cell:
        shown = ", ".join(f"{round_:,}" for round_ in item[2].rounds[:MOST_ROUNDS])
        left = len(item[2].rounds) - MOST_ROUNDS
        return words(f"{shown} and {left:,} more" if left > 0 else shown)

    columns = [
        Column("algorithm", "algorithm", lambda item: item[0]),
        Column("client", "client", lambda item: item[2].name),
        Column("seed", "seed", lambda item: item[1]),
        Column("rejected", "rejected", lambda item: item[2].rejected),
        Column("flagged", "flagged", lambda item: item[2].flagged),
        Column("largest", "largest", lambda item: _largest(item[2].ratio)),
        Column("rounds", "", rounds),
        Column("", "first_round", lambda item: item[2].rounds[0]),
        Column("", "rounds", lambda item: len(item[2].rounds)),
    ]
    caption = f"{CAPTION}, of flagged updates if there are any.{_cut(items)}"
    title = f"Unusual uploads on {study.name}"
    return Table.build("uploads", title, columns, items[:MOST_ROWS], caption, words=2)


def _largest(ratio: float | None) -> Cell:
    finite = ratio is not None and math.isfinite(ratio)
    return Cell(f"{ratio:.2g}" if finite else "not finite", ratio)


def _cut(items: Sized) -> str:
    return f" The first {MOST_ROWS} of {len(items):,} rows." * (len(items) > MOST_ROWS)
