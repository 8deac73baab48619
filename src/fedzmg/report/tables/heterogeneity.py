"""Tables of how much clients differ: data sets side by side, one data set, some of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.data.heterogeneity import PAPER
from fedzmg.report import measures
from fedzmg.report.tables.sheet import NOTHING, Cell, Record, Sheet
from fedzmg.results import paper
from fedzmg.results.formatting import MINUS

SHOWN_CLIENTS = 10
_OF_CLIENTS = ("volume", "distinct", "entropy", "gini", "kl", "dominant_share")


def side_by_side(reports: Sequence[Mapping[str, Any]]) -> Sheet:
    """Every data set in a row, and beneath it what the paper printed of it or of its model."""
    rows: list[list[Cell]] = []
    records: list[Record] = []
    for report in reports:
        name, summary = str(report["name"]), report.get("summary", {})
        found = {m: measures.spread(m, summary[m]) for m in measures.NAMES if m in summary}
        rows.append(_row(paper.shown(name), _clients_of(report), found))
        records.append({"data": name, **_flat(summary)})
        printed = _printed(name)
        if printed is not None:
            title = f"paper: {paper.COUNTERPARTS[name].dataset.title}"
            given = {m: measures.printed(printed, m) for m in printed["summary"]}
            rows.append(_row(title, str(printed["sample"]), given))
            pairs = {m: {"mean": v[0], "sd": v[1]} for m, v in printed["summary"].items()}
            records.append({"data": title, **_flat(pairs)})
    heads = ("data", "clients", *measures.NAMES.values())
    caption = "Mean ± standard deviation over clients; details below."
    title = "How much clients differ, all data sets"
    return Sheet("heterogeneity", title, heads, rows, caption, records)


def heterogeneity(report: Mapping[str, Any]) -> Sheet:
    """Mean and deviation of every measure over clients, beside the paper's."""
    name = str(report["name"])
    printed = _printed(name)
    rows = []
    records: list[Record] = []
    for measure, spread in report.get("summary", {}).items():
        row = [Cell(measures.NAMES.get(measure, measure)), Cell(measures.spread(measure, spread))]
        record: Record = {"measure": measure, "mean": spread["mean"], "sd": spread["sd"]}
        if printed is not None:
            other = printed["summary"].get(measure)
            gap = None if other is None else spread["mean"] - other[0]
            row.append(NOTHING if other is None else Cell(measures.printed(printed, measure)))
            row.append(NOTHING if gap is None else Cell(_difference(measure, gap), gap))
            record["paper_mean"] = None if other is None else other[0]
            record["paper_sd"] = None if other is None else other[1]
            record["difference"] = gap
        rows.append(row)
        records.append(record)
    heads = ("measure", "mean ± sd", *(("paper", "difference") if printed is not None else ()))
    title = f"How much clients of {paper.shown(name)} differ"
    return Sheet("heterogeneity", title, heads, rows, _caption(report), records)


def client_by_client(report: Mapping[str, Any]) -> Sheet:
    """The first clients of a report one by one, and those that the paper names."""
    name, listed = str(report["name"]), report.get("clients", [])[:SHOWN_CLIENTS]
    printed = _printed(name)
    theirs = [] if printed is None else printed["clients"]
    rows: list[list[Cell]] = []
    records: list[Record] = []
    for source, client in [*(("here", c) for c in listed), *(("paper", c) for c in theirs)]:
        shown = str(client["client"])
        cells = [Cell(shown if source == "here" else f"paper: {shown}")]
        for measure in _OF_CLIENTS:
            value = client.get(measure)
            words = measures.number(measure, value)
            if measure == "dominant_share" and "dominant_class" in client:
                words += f" ({measures.visible(str(client['dominant_class']))})"
            cells.append(NOTHING if value is None else Cell(words, float(value)))
        rows.append(cells)
        records.append(
            {"source": source, "client": shown, **{m: client.get(m) for m in _OF_CLIENTS}}
        )
    heads = ("client", *(measures.NAMES[measure] for measure in _OF_CLIENTS))
    title = f"Clients of {paper.shown(name)} one by one"
    return Sheet("clients-described", title, heads, rows, _caption(report), records)


def _row(name: str, clients: str, found: Mapping[str, str]) -> list[Cell]:
    cells = [Cell(found[m]) if m in found else NOTHING for m in measures.NAMES]
    return [Cell(name), Cell(clients), *cells]


def _flat(summary: Mapping[str, Mapping[str, Any]]) -> Record:
    return {f"{m}_{part}": spread[part] for m, spread in summary.items() for part in ("mean", "sd")}


def _difference(measure: str, gap: float) -> str:
    return "0" if gap == 0 else measures.number(measure, float(gap), "+").replace("-", MINUS)


def _printed(name: str) -> Mapping[str, Any] | None:
    """What the paper printed of a data set or of the one that it stands for."""
    twin = paper.COUNTERPARTS.get(name)
    return PAPER.get(twin.dataset.described) if twin is not None else None


def _clients_of(report: Mapping[str, Any]) -> str:
    return f"{len(report.get('clients', [])):,} of {report.get('total', 0):,}"


def _caption(report: Mapping[str, Any]) -> str:
    name = str(report["name"])
    caption = (
        f"{_clients_of(report)} clients; volume in {report.get('unit', 'examples')}; entropy over "
        f"{measures.divisor(report)}; KL from {measures.origin(report)}, in nats."
    )
    twin = paper.COUNTERPARTS.get(name)
    if twin is not None and _printed(name) is not None and name != twin.dataset.described:
        caption += f" The paper's numbers are about its own {twin.dataset.title}, not about {name}."
    return caption
