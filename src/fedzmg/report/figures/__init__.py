"""Every figure of a report, drawn once by matplotlib; the page embeds the same figure as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedzmg.report.figures import runs
from fedzmg.report.figures.curves import curves, traffic
from fedzmg.report.figures.data import distances, examples, heterogeneity
from fedzmg.report.figures.diagnose import diagnosis
from fedzmg.report.figures.grids import heat_map, heat_maps
from fedzmg.report.figures.style import FORMATS, Chart, rendered, save
from fedzmg.report.figures.theory import theory
from fedzmg.results import paper
from fedzmg.results.formatting import slug
from fedzmg.results.grids import name_of
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

__all__ = [
    "FORMATS", "STUDY_FIGURES", "Chart", "curves", "diagnosis", "distances", "draw", "examples",
    "grid_names", "heat_map", "heat_maps", "heterogeneity", "numbered", "rendered", "save",
    "study_prefixes", "theory",
]  # fmt: skip

STUDY_FIGURES: dict[str, Callable[[StudyResult], Chart | None]] = {
    "curves": curves,
    "differences": runs.differences,
    "seeds": runs.seeds,
    "traffic": traffic,
    "refused-uploads": runs.dropped,
    "diverged": runs.diverged,
    "clients": runs.clients,
    "clients-by-round": runs.clients_by_round,
    "client-loss": runs.client_loss,
}
"""Figures of a study by the stem of their files; each is None where there is nothing to draw."""


def draw(material: Material, results: Sequence[StudyResult]) -> dict[str, Chart]:
    """Draw every figure of a report, by the stem of its files."""
    found: dict[str, Chart | None] = {}
    for prefix, result in zip(study_prefixes(results), results, strict=True):
        found |= {prefix + name: make(result) for name, make in STUDY_FIGURES.items()}
    for prefix, extra in zip(grid_names(material), material.grids, strict=True):
        for name in extra.content["algorithms"]:
            found[f"{prefix}-{slug(name)}"] = heat_map(extra.content, name)
        found[f"{prefix}-heat-maps"] = heat_maps(extra.content)
    reports = [extra.content for extra in material.heterogeneity]
    for suffix, report in zip(numbered(reports), reports, strict=True):
        if report.get("clients") and report.get("counts"):
            printed = paper.described(str(report["name"]))
            found[f"heterogeneity{suffix}"] = heterogeneity(report, printed)
        found[f"client-distances{suffix}"] = distances(report)
    return {stem: chart for stem, chart in found.items() if chart is not None}


def study_prefixes(results: Sequence[StudyResult]) -> list[str]:
    """Return what tells the files of several studies apart."""
    if len(results) == 1:
        return [""]
    return [f"{i + 1}-{slug(result.study.name)}-" for i, result in enumerate(results)]


def grid_names(material: Material) -> list[str]:
    """Return what tells the files of several grids apart."""
    if len(material.grids) == 1:
        return ["grid"]
    return [f"grid{i + 1}-{slug(name_of(one.content))}" for i, one in enumerate(material.grids)]


def numbered(found: Sequence[object]) -> list[str]:
    """Return a suffix for each of several files; none for a single one."""
    return [""] if len(found) == 1 else [f"-{i + 1}" for i in range(len(found))]
