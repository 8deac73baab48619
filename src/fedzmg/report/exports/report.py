"""A report: its page, and its tables and figures as files for papers, slides and spreadsheets.

Tables are written as Markdown, LaTeX and CSV (with full precision), figures as PNG, SVG and PDF.
The same outcome gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedzmg.report.html.page import render
from fedzmg.report.tables import costs, scores
from fedzmg.report.tables.beside_paper import beside_paper
from fedzmg.report.tables.clients import clients
from fedzmg.report.tables.formats import comma_separated, latex, markdown
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import client_by_client, heterogeneity, side_by_side
from fedzmg.report.tables.paired_tests import paired_tests
from fedzmg.report.tables.sheet import Sheet
from fedzmg.report.writing import Cleared, check_place, refuse_foreign, replace_files
from fedzmg.results import paper
from fedzmg.results.formatting import slug
from fedzmg.results.grids import name_of
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"
SHEETS: tuple[Callable[[StudyResult], Sheet | None], ...] = (
    scores.scores,
    paired_tests,
    scores.thresholds,
    beside_paper,
    clients,
    scores.finals,
    costs.traffic,
    costs.settings,
)
"""The tables of a study."""
_FORMATS: dict[str, Callable[[Sheet], str]] = {
    "md": markdown,
    "tex": latex,
    "csv": comma_separated,
}


class Published(NamedTuple):
    """A report that was written."""

    page: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    cleared: Cleared


def publish(
    material: Material, outcomes: Sequence[StudyResult], out: Path, *, page_only: bool = False
) -> Published:
    """Write page, tables and figures in place of those of an earlier report.

    Args:
        material: what was read.
        outcomes: an outcome for each study.
        out: a directory; it is made. What no report wrote there is left alone.
        page_only: leave out the files of tables and figures.

    Raises:
        InputError: if a file cannot be written, or would replace one that no report wrote.
    """
    check_place(out)
    # Before the long work; the names of tables and figures are known only after it.
    refuse_foreign(out, [PAGE])
    words = {} if page_only else dict(tables(material, outcomes))
    drawn = {} if page_only else dict(figures(material, outcomes))
    page = {PAGE: render(material, outcomes).encode()}
    cleared = replace_files(out, {**page, **words, **drawn})
    return Published(
        out / PAGE,
        tuple(out / name for name in words),
        tuple(out / name for name in drawn),
        cleared,
    )


def tables(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[tuple[str, bytes]]:
    """Every table in three formats: names of files, below ``tables``, and what they hold."""
    for name, sheet in _sheets(material, outcomes):
        for suffix, make in _FORMATS.items():
            yield f"tables/{name}.{suffix}", make(sheet).encode()


def figures(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[tuple[str, bytes]]:
    """Every figure as PNG, SVG and PDF: names of files, below ``figures``, and what they hold."""
    # Drawing takes its time to load, and a page alone does not need it.
    from fedzmg.report.plots.style import FORMATS, rendered

    for stem, figure in _drawn(material, outcomes):
        for suffix in FORMATS:
            yield f"figures/{stem}.{suffix}", rendered(figure, suffix)


def _drawn(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[tuple[str, Figure]]:
    from fedzmg.report.plots import comparison, grids
    from fedzmg.report.plots import study as plots
    from fedzmg.report.plots.heterogeneity import figure as clients_described

    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        for name, figure in plots.study_figures(outcome):
            yield prefix + name, figure
    for before, extra in zip(_grid_names(material), material.grids, strict=True):
        data = {**extra.content, "task": paper.shown(str(extra.content["task"]))}
        for name in data["algorithms"]:
            yield f"{before}-{slug(name)}", grids.figure(data, name)
    # What stands in the directories already, from the same functions: the same bytes.
    planned = [outcome for outcome in outcomes if outcome.study.place]
    places = [outcome.study.place for outcome in planned]
    for before, outcome in zip(_overviews(places), planned, strict=True):
        yield f"{before}-curves", comparison.figure(outcome)
    places = [extra.place for extra in material.grids]
    for before, extra in zip(_overviews(places), material.grids, strict=True):
        yield f"{before}-heat-maps", grids.figures(extra.content)
    described = [extra.content for extra in material.heterogeneity]
    for after, report in zip(_numbered(described), described, strict=True):
        if report.get("clients") and report.get("counts"):
            yield (
                f"heterogeneity{after}",
                clients_described(report, paper.described(str(report["name"]))),
            )


def _sheets(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[tuple[str, Sheet]]:
    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        for make in SHEETS:
            sheet = make(outcome)
            if sheet is not None:
                yield prefix + sheet.key, sheet
    for name, extra in zip(_grid_names(material), material.grids, strict=True):
        yield name, best_points(extra.content)
    described = [extra.content for extra in material.heterogeneity]
    if len(described) > 1:
        yield "heterogeneity", side_by_side(described)
    for after, report in zip(_numbered(described), described, strict=True):
        yield f"heterogeneity{after}", heterogeneity(report)
        yield f"heterogeneity-clients{after}", client_by_client(report)


def _grid_names(material: Material) -> list[str]:
    """What tells the files of several grids apart."""
    if len(material.grids) == 1:
        return ["grid"]
    return [f"grid{i + 1}-{slug(name_of(one.content))}" for i, one in enumerate(material.grids)]


def _overviews(places: Sequence[str]) -> list[str]:
    """The same for figures of whole directories."""
    if len(places) == 1:
        return ["overview"]
    return [f"overview{i + 1}-{slug(place)}" for i, place in enumerate(places)]


def _numbered(found: Sequence[object]) -> list[str]:
    return [""] if len(found) == 1 else [f"-{i + 1}" for i in range(len(found))]


def _prefixes(outcomes: Sequence[StudyResult]) -> list[str]:
    """What tells the files of several studies apart."""
    if len(outcomes) == 1:
        return [""]
    return [f"{i + 1}-{slug(outcome.study.name)}-" for i, outcome in enumerate(outcomes)]
