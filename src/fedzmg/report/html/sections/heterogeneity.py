"""The section on how much clients differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedzmg.report.html.blocks import Block, Chart, Charts, Section, Table
from fedzmg.report.html.svg.parts import Frame
from fedzmg.report.html.svg.scatter import scatter
from fedzmg.report.tables.heterogeneity import client_by_client, heterogeneity, side_by_side
from fedzmg.results import paper
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

MOST_SCATTERED = 4000


def sections(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[Section]:
    """One section for all data sets."""
    del outcomes
    if not material.heterogeneity:
        return
    described = [extra.content for extra in material.heterogeneity]
    blocks: list[Block] = [Table(side_by_side(described))] if len(described) > 1 else []
    for i, report in enumerate(described):
        blocks.append(Table(heterogeneity(report), paper.shown(str(report["name"]))))
        chart = _distances(report, f"h{i}")
        blocks += [] if chart is None else [Charts((chart,))]
        blocks += [Table(client_by_client(report))] if report.get("clients") else []
    yield Section("heterogeneity", "Heterogeneity", "", tuple(blocks))


def _distances(report: Mapping[str, Any], key: str) -> Chart | None:
    """Every client, by how far it is from the whole and, if that differs, by what it holds."""
    clients = report.get("clients", [])
    if not 1 < len(clients) <= MOST_SCATTERED:
        return None
    title, xlabel = "How far clients are from the whole", "clients, nearest first"
    points = [(str(c["client"]), float(c["volume"]), float(c["kl"])) for c in clients]
    if len({volume for _, volume, _ in points}) > 1:
        title += ", by how much they hold"
        xlabel = f"volume ({report.get('unit', 'examples')})"
    else:
        ordered = sorted(points, key=lambda point: point[2])
        points = [(name, float(i + 1), kl) for i, (name, _, kl) in enumerate(ordered)]
    frame = Frame(key, title, f"{len(points)} clients.", xlabel, "KL divergence")
    return Chart("distances", title, "A dot is a client.", scatter(points, frame))
