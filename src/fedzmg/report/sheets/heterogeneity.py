"""The table of how much clients differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedzmg.data.heterogeneity import PAPER
from fedzmg.report import paper
from fedzmg.report.numbers import signed_text
from fedzmg.report.sheets.sheet import NOTHING, Cell, Record, Sheet


def heterogeneity(report: Mapping[str, Any]) -> Sheet:
    """Mean and deviation of every measure over clients, beside the paper's."""
    name = str(report["name"])
    twin = paper.COUNTERPARTS.get(name)
    printed = PAPER.get(twin.dataset.described) if twin is not None else None
    rows = []
    records: list[Record] = []
    for measure, spread in report.get("summary", {}).items():
        row = [Cell(measure.replace("_", " ")), Cell(_spread(spread["mean"], spread["sd"]))]
        record: Record = {"measure": measure, "mean": spread["mean"], "sd": spread["sd"]}
        if printed is not None:
            other = printed["summary"].get(measure)
            gap = None if other is None else spread["mean"] - other[0]
            row.append(NOTHING if other is None else Cell(_spread(*other)))
            row.append(NOTHING if gap is None else Cell(signed_text(gap, ".3g"), gap))
            record["paper_mean"] = None if other is None else other[0]
            record["paper_sd"] = None if other is None else other[1]
            record["difference"] = gap
        rows.append(row)
        records.append(record)
    heads = ("measure", "mean ± sd", *(("paper", "difference") if printed is not None else ()))
    total, described = report.get("total", 0), len(report.get("clients", []))
    caption = (
        f"{described:,} of {total:,} clients; volume in {report.get('unit', 'examples')}; entropy "
        f"over the logarithm of {report.get('entropy', 'classes')}; KL from the "
        f"{report.get('reference', 'global')} distribution."
    )
    if twin is not None and printed is not None and name != twin.dataset.described:
        caption += f" The paper's column is about its own {twin.dataset.title}, not about {name}."
    title = f"How much clients of {paper.shown(name)} differ"
    return Sheet("heterogeneity", title, heads, rows, caption, records)


def _spread(mean: float, sd: float | None) -> str:
    return f"{mean:,.4g}" if sd is None else f"{mean:,.4g} ± {sd:,.3g}"
