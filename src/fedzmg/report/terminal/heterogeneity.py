"""How much clients differ, as tables of a terminal.

They start from the dictionary of a :class:`fedzmg.data.heterogeneity.Report`, as kept in JSON;
``paper`` is an entry of :data:`fedzmg.data.heterogeneity.PAPER` to stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedzmg.report import measures
from fedzmg.report.tables.heterogeneity import SHOWN_CLIENTS


def table(report: Mapping[str, Any], paper: Mapping[str, Any] | None = None) -> RenderableType:
    """The summary, beside the paper's if given, and the first clients."""
    return Group(_summary(report, paper), _notes(report, paper), Text(), _clients(report, paper))


def _summary(report: Mapping[str, Any], paper: Mapping[str, Any] | None) -> Table:
    summary = Table(
        title=Text(f"{report['name'] or 'data'}: {measures.who(report)}", style="italic"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    summary.add_column("mean ± sd", no_wrap=True)
    summary.add_column("here", justify="right", no_wrap=True)
    if paper is not None:
        summary.add_column("paper", justify="right", no_wrap=True)
    for measure, head in measures.NAMES.items():
        cells = [head, measures.spread(measure, report["summary"][measure])]
        summary.add_row(*cells, *([measures.printed(paper, measure)] if paper is not None else []))
    return summary


def _notes(report: Mapping[str, Any], paper: Mapping[str, Any] | None) -> Text:
    notes = (
        f"volume in {report['unit']}; entropy / {measures.divisor(report)}; Gini over all "
        f"{len(report['labels'])} classes; KL from {measures.origin(report)}, in nats"
    )
    if paper is not None:
        notes += (
            f"\npaper: {paper['sample']} clients; volume in {paper['unit']}; its numbers fit "
            f"entropy / {measures.divisor(paper)} and KL from {measures.origin(paper)}"
        )
    return Text(notes, style="dim")


def _clients(report: Mapping[str, Any], paper: Mapping[str, Any] | None) -> Table:
    rows = report["clients"]
    shown = rows[:SHOWN_CLIENTS]
    part = f"first {len(shown)} of {len(rows):,} " if len(rows) > len(shown) else ""
    table = Table(
        title=f"{part}clients",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("client", overflow="fold")
    for head in (report["unit"], "classes", "entropy", "Gini", "KL", "dominant"):
        table.add_column(head, justify="right", no_wrap=True)
    columns = ("volume", "distinct", "entropy", "gini", "kl")
    for row in shown:
        share = measures.number("dominant_share", row["dominant_share"])
        table.add_row(
            Text(row["client"]),
            *(measures.number(column, row[column]) for column in columns),
            Text(f"{share} {measures.visible(row['dominant_class'])}"),
        )
    if paper is not None:
        table.add_section()
        for row in paper["clients"]:
            cells = [measures.number(m, row[m]) for m in ("volume", "distinct")]
            cells += ["-" if row.get(m) is None else f"{row[m]:.2f}" for m in columns[2:]]
            share = measures.number("dominant_share", row["dominant_share"])
            table.add_row(Text(f"paper: {row['client']}"), *cells, share)
    return table
