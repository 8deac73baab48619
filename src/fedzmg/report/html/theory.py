"""Findings of ``fedzmg theory`` as one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedzmg.report.figures.style import Chart
from fedzmg.report.html.blocks import Section, TableBlock, Text, arranged, picture
from fedzmg.report.html.page import fill
from fedzmg.report.tables.theory import Finding, finding_table, overview
from fedzmg.version import __version__

_INTRODUCTION = (
    "Every check computes the prediction of a claim and measures it. Lines marked as claim decide "
    "whether it holds as printed. All other lines are derived in docs/theory.md; one that "
    "disagreed would void the verdict."
)


def page(findings: Sequence[Finding], charts: Mapping[str, Sequence[Chart]]) -> str:
    """Make the page.

    Args:
        findings: results of all checks.
        charts: figures by check.
    """
    return fill(
        title="The theory of FedZMG, checked",
        kicker="fedzmg theory",
        summaries=[_INTRODUCTION],
        sections=[
            Section("verdicts", "Verdicts", "", (TableBlock(overview(findings), "Verdicts"),)),
            *_sections(findings, charts),
        ],
        footer=f"Made by fedzmg {__version__}: fedzmg theory --html FILE",
    )


def _sections(
    findings: Sequence[Finding], charts: Mapping[str, Sequence[Chart]]
) -> Iterator[Section]:
    for finding in findings:
        key, verdict = str(finding["id"]), str(finding["verdict"])
        table = finding_table(finding)._replace(title=f"Numbers of {key}")
        own = charts.get(key, ())
        yield Section(
            key,
            f"{key} \u00b7 {finding['title']}",
            str(finding["setting"]),
            (
                Text(str(finding["claim"])),
                Text(verdict, f"verdict {verdict.split()[0]}"),
                TableBlock(table),
                arranged(picture(one, f"{key}-{i}") for i, one in enumerate(own)),
            ),
        )
