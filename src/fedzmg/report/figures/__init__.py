"""Every figure of a report, drawn once by matplotlib; the page embeds the same figure as SVG."""

from collections.abc import Sequence

from fedzmg.report.figures.data import examples, heterogeneity
from fedzmg.report.figures.grids import heat_maps
from fedzmg.report.figures.study import STUDY_FIGURES, curves
from fedzmg.report.figures.style import FORMATS, Chart, rendered, save
from fedzmg.report.figures.theory import diagnosis, theory
from fedzmg.results import paper
from fedzmg.results.formatting import slug
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

__all__ = [
    "FORMATS", "STUDY_FIGURES", "Chart", "by_prefix", "curves", "diagnosis", "draw", "examples",
    "heat_maps", "heterogeneity", "rendered", "save", "theory",
]  # fmt: skip


def draw(material: Material, results: Sequence[StudyResult]) -> dict[str, Chart]:
    """Draw every figure of a report, by the stem of its files."""
    found: dict[str, Chart | None] = {}
    for prefix, result in by_prefix(results).items():
        found |= {prefix + name: make(result) for name, make in STUDY_FIGURES.items()}
    for stem, grid in material.grids.items():
        found |= {f"{stem}-{slug(name)}": heat_maps(grid, name) for name in grid["algorithms"]}
        found[f"{stem}-heat-maps"] = heat_maps(grid)
    for suffix, report in material.heterogeneity.items():
        if report.get("clients") and report.get("counts"):
            printed = paper.described(str(report["name"]))
            found[f"heterogeneity{suffix}"] = heterogeneity(report, printed)
    return {stem: chart for stem, chart in found.items() if chart is not None}


def by_prefix(results: Sequence[StudyResult]) -> dict[str, StudyResult]:
    """Return studies by the prefix of their files; a single study has none."""
    names = (f"{i}-{slug(one.study.name)}-" for i, one in enumerate(results, 1))
    return dict(zip(names if results[1:] else [""], results, strict=True)) if results else {}
