"""Tables of heterogeneity: data sets side by side, one data set, some of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.data.heterogeneity import PAPER
from fedzmg.report import measures
from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results import paper
from fedzmg.results.formatting import MINUS

SHOWN_CLIENTS = 10
_OF_CLIENTS = ("volume", "distinct", "entropy", "gini", "kl", "dominant_share")


def side_by_side(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Make a row per data set, each followed by the paper's numbers where it has some."""
    rows: list[list[Cell]] = []
    records: list[Record] = []
    for report in reports:
        name, summary = str(report["name"]), report.get("summary", {})
        texts = {m: measures.spread(m, summary[m]) for m in measures.NAMES if m in summary}
        rows.append(_row(paper.shown(name), _clients_of(report), texts))
        records.append({"data": name, **_flat(summary)})
        printed = _printed(name)
        if printed is not None:
            title = f"paper: {paper.COUNTERPARTS[name].dataset.title}"
            texts = {m: measures.printed(printed, m) for m in printed["summary"]}
            rows.append(_row(title, str(printed["sample"]), texts))
            pairs = {m: {"mean": v[0], "sd": v[1]} for m, v in printed["summary"].items()}
            records.append({"data": title, **_flat(pairs)})
    heads = ("data", "clients", *measures.NAMES.values())
    caption = "Mean ± standard deviation over clients; details below."
    title = "How much clients differ, all data sets"
    return Table("heterogeneity", title, heads, rows, caption, records)


def heterogeneity(report: Mapping[str, Any], printed: Mapping[str, Any] | None = None) -> Table:
    """Make a row per measure: mean and deviation over clients, here and in the paper.

    Args:
        report: dictionary of a :class:`fedzmg.data.heterogeneity.Report`.
        printed: the paper's numbers; by default those of the data set with this name.
    """
    name = str(report["name"])
    printed = printed or _printed(name)
    rows = []
    records: list[Record] = []
    for measure, spread in report.get("summary", {}).items():
        row = [Cell(measures.NAMES.get(measure, measure)), Cell(measures.spread(measure, spread))]
        record: Record = {"measure": measure, "mean": spread["mean"], "sd": spread["sd"]}
        if printed is not None:
            mean, sd = printed["summary"].get(measure, (None, None))
            gap = None if mean is None else spread["mean"] - mean
            row.append(NOTHING if mean is None else Cell(measures.printed(printed, measure)))
            row.append(NOTHING if gap is None else Cell(_difference(measure, gap), gap))
            record |= {"paper_mean": mean, "paper_sd": sd, "difference": gap}
        rows.append(row)
        records.append(record)
    heads = ("measure", "mean ± sd", *(("paper", "difference") if printed is not None else ()))
    title = f"How much clients of {paper.shown(name)} differ"
    return Table("heterogeneity", title, heads, rows, _caption(report, printed), records)


def client_by_client(report: Mapping[str, Any], printed: Mapping[str, Any] | None = None) -> Table:
    """Make a row for each of the first clients of a report, and for those the paper names."""
    name, listed = str(report["name"]), report.get("clients", [])[:SHOWN_CLIENTS]
    printed = printed or _printed(name)
    theirs = [] if printed is None else printed["clients"]
    rows: list[list[Cell]] = []
    records: list[Record] = []
    for source, client in [*(("here", c) for c in listed), *(("paper", c) for c in theirs)]:
        shown = str(client["client"])
        cells = [Cell(shown if source == "here" else f"paper: {shown}")]
        for measure in _OF_CLIENTS:
            value = client.get(measure)
            text = measures.number(measure, value)
            if measure == "dominant_share" and "dominant_class" in client:
                text += f" ({measures.visible(str(client['dominant_class']))})"
            cells.append(NOTHING if value is None else Cell(text, float(value)))
        rows.append(cells)
        values = {measure: client.get(measure) for measure in _OF_CLIENTS}
        records.append({"source": source, "client": shown, **values})
    heads = ("client", *(measures.NAMES[measure] for measure in _OF_CLIENTS))
    title = f"Clients of {paper.shown(name)} one by one"
    return Table("clients-described", title, heads, rows, _caption(report, printed), records)


def _row(name: str, clients: str, texts: Mapping[str, str]) -> list[Cell]:
    cells = [Cell(texts[m]) if m in texts else NOTHING for m in measures.NAMES]
    return [Cell(name), Cell(clients), *cells]


def _flat(summary: Mapping[str, Mapping[str, Any]]) -> Record:
    return {f"{m}_{part}": spread[part] for m, spread in summary.items() for part in ("mean", "sd")}


def _difference(measure: str, gap: float) -> str:
    return "0" if gap == 0 else measures.number(measure, float(gap), "+").replace("-", MINUS)


def _printed(name: str) -> Mapping[str, Any] | None:
    """Find the paper's numbers for a data set or for the one it stands in for."""
    twin = paper.COUNTERPARTS.get(name)
    return PAPER.get(twin.dataset.described) if twin is not None else None


def _clients_of(report: Mapping[str, Any]) -> str:
    return f"{len(report.get('clients', [])):,} of {report.get('total', 0):,}"


def _caption(report: Mapping[str, Any], printed: Mapping[str, Any] | None) -> str:
    name = str(report["name"])
    caption = (
        f"{_clients_of(report)} clients; volume in {report.get('unit', 'examples')}; entropy over "
        f"{measures.divisor(report)}; KL from {measures.origin(report)}, in nats."
    )
    if printed is not None:
        caption += (
            f" Paper: {printed['sample']} clients; volume in {printed['unit']}; its numbers fit "
            f"entropy over {measures.divisor(printed)} and KL from {measures.origin(printed)}."
        )
    twin = paper.COUNTERPARTS.get(name)
    if twin is not None and printed is not None and name != twin.dataset.described:
        caption += f" The paper's numbers are about its own {twin.dataset.title}, not about {name}."
    return caption
