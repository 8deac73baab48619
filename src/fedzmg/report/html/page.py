"""One self-contained page with the words, tables and figures of results.

It needs no network, no other file and no script; the same directories give the same bytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from fedzmg.report import figures
from fedzmg.report.figures import Chart
from fedzmg.report.html import sections
from fedzmg.report.html.blocks import Block, Section, picture, table_block
from fedzmg.report.tables.theory import Finding, finding_table, overview
from fedzmg.results import paper
from fedzmg.results.formatting import count_text
from fedzmg.results.reading import Material, axes_of, name_of
from fedzmg.results.study_result import StudyResult, study_result
from fedzmg.results.summary import summary
from fedzmg.version import __version__

_THEORY = (
    "Every check computes the prediction of a claim and measures it. Lines marked as claim decide "
    "whether it holds as printed. All other lines are derived in docs/theory.md; one that "
    "disagreed would void the verdict."
)


def render(
    material: Material,
    results: Sequence[StudyResult] | None = None,
    drawn: Mapping[str, Chart] | None = None,
) -> str:
    """Make the page of a report, with results and figures that are known already if given."""
    results = [study_result(study) for study in material.studies] if results is None else results
    drawn = figures.draw(material, results) if drawn is None else drawn
    grids = list(material.grids.values())
    summaries = [" ".join(summary(result, grids)) for result in results]
    return _fill(
        title=_title(material),
        kicker=f"fedzmg report \u00b7 {', '.join(material.names)}",
        summaries=summaries or _without_runs(material),
        sections=[
            *sections.of_studies(results, drawn),
            *sections.of_grids(material, drawn),
            *sections.of_heterogeneity(material, drawn),
            sections.reproduction(material),
        ],
        footer=f"Made by fedzmg {__version__} from the files of the runs alone.",
    )


def theory_page(findings: Sequence[Finding]) -> str:
    """Make the page of the checks of the theory."""
    found = [Section("verdicts", "Verdicts", "", [table_block(overview(findings), "Verdicts")])]
    for finding in findings:
        key, verdict = str(finding["id"]), str(finding["verdict"])
        charts = figures.theory(finding).values()
        blocks = [
            Block("text", str(finding["claim"])),
            Block("text", verdict, style=f"verdict {verdict.split()[0]}"),
            table_block(finding_table(finding), f"Numbers of {key}"),
            Block("pictures", [picture(one, f"{key}-{i}") for i, one in enumerate(charts)]),
        ]
        title = f"{key} \u00b7 {finding['title']}"
        found.append(Section(key, title, str(finding["setting"]), blocks))
    return _fill(
        title="The theory of FedZMG, checked",
        kicker="fedzmg theory",
        summaries=[_THEORY],
        sections=found,
        footer=f"Made by fedzmg {__version__}: fedzmg theory --html FILE",
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedzmg.report.html", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # A percent sign stays on the line of its number.
    environment.filters["unbroken"] = lambda text: str(text).replace(" %", "\u00a0%")
    return environment.get_template("page.html.jinja")


def _fill(**parts: Any) -> str:
    return re.sub(r"\n\s*\n+", "\n", _template().render(version=__version__, **parts))


def _without_runs(material: Material) -> list[str]:
    """Describe a page without runs."""
    grids = material.grids.values()
    words = [f"A grid over {' and '.join(axes_of(one))} on {name_of(one)}." for one in grids]
    if material.heterogeneity:
        sets = count_text(len(material.heterogeneity), "data set")
        words.append(f"The clients of {sets}, described by their data; nothing is trained.")
    return words or ["Nothing can be shown yet: the last section says why."]


def _title(material: Material) -> str:
    grids = material.grids.values()
    subjects = [study.name for study in material.studies] or [name_of(one) for one in grids]
    if len(set(subjects)) > 1:
        tasks = [study.task for study in material.studies] or [str(one["task"]) for one in grids]
        subjects = [paper.shown(task) for task in dict.fromkeys(tasks)]
    if not subjects and material.heterogeneity:
        described = (str(one["name"]) for one in material.heterogeneity.values())
        return "How much clients differ: " + ", ".join(described)
    shown = list(dict.fromkeys(subjects)) or list(material.names)
    return "Federated learning on " + ", ".join(shown[:3]) + (" and more" if shown[3:] else "")
