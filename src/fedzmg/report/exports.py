"""Files that commands write: reports, descriptions of data, and checks of the theory.

Tables of a report are written as Markdown, LaTeX, CSV and JSON (the last two with full precision),
figures as PNG, SVG and PDF. The same results give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedzmg.report.tables import study
from fedzmg.report.tables.beside_paper import beside_paper
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import client_by_client, heterogeneity, side_by_side
from fedzmg.report.tables.table import Table, to_csv, to_json, to_latex, to_markdown
from fedzmg.report.tables.theory import Finding
from fedzmg.report.writing import Cleared, check_place, refuse_foreign, replace_files, write
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

if TYPE_CHECKING:
    from fedzmg.report.figures import Chart

PAGE = "report.html"
DESCRIPTION = tuple(f"heterogeneity.{suffix}" for suffix in ("json", "csv", "png", "svg"))
"""Files of ``fedzmg data describe``."""
_STUDY_TABLES: tuple[Callable[[StudyResult], Table | None], ...] = (
    study.scores, study.paired_tests, study.thresholds, beside_paper, study.clients, study.finals,
    study.traffic, study.settings,
)  # fmt: skip
_FORMATS: dict[str, Callable[[Table], str]] = {
    "md": to_markdown,
    "tex": to_latex,
    "csv": to_csv,
    "json": to_json,
}


class Published(NamedTuple):
    """Paths of a written report."""

    page: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    cleared: Cleared


def publish(
    material: Material, results: Sequence[StudyResult], out: Path, *, page_only: bool = False
) -> Published:
    """Write page, tables and figures in place of those of an earlier report.

    Args:
        material: directories read back.
        results: a result for each study.
        out: a directory; it is made. Files that no report wrote there are left alone.
        page_only: leave out the files of tables and figures.

    Raises:
        InputError: if a file cannot be written, or would replace one that no report wrote.
    """
    check_place(out)
    # Before the long work; the names of tables and figures are known only after it.
    refuse_foreign(out, [PAGE])
    # matplotlib takes its time to load.
    from fedzmg.report import figures as drawing
    from fedzmg.report.html.page import render

    drawn = drawing.draw(material, results)
    words = {} if page_only else dict(tables(material, results))
    pictures = {} if page_only else dict(figures(drawn, out))
    page = {PAGE: render(material, results, drawn).encode()}
    cleared = replace_files(out, {**page, **words, **pictures})
    written, drawings = (tuple(out / name for name in names) for names in (words, pictures))
    return Published(out / PAGE, written, drawings, cleared)


def tables(material: Material, results: Sequence[StudyResult]) -> Iterator[tuple[str, bytes]]:
    """Yield every table in four formats: file name below ``tables``, and content."""
    for name, table in _tables(material, results):
        for suffix, make in _FORMATS.items():
            yield f"tables/{name}.{suffix}", make(table).encode()


def figures(drawn: Mapping[str, Chart], before: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every figure as PNG, SVG and PDF: file name below ``figures``, and content.

    Args:
        drawn: figures by the stem of their files.
        before: directory of an earlier report; files whose SVG is unchanged are taken from it.
    """
    from fedzmg.report.figures import FORMATS, rendered

    for stem, chart in drawn.items():
        names = {suffix: f"figures/{stem}.{suffix}" for suffix in FORMATS}
        svg = rendered(chart, "svg")
        same = _content(before / names["svg"]) == svg
        for suffix, name in names.items():
            old = _content(before / name) if same else None
            yield name, old or (svg if suffix == "svg" else rendered(chart, suffix))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _tables(material: Material, results: Sequence[StudyResult]) -> Iterator[tuple[str, Table]]:
    from fedzmg.report.figures import grid_names, numbered, study_prefixes

    for prefix, result in zip(study_prefixes(results), results, strict=True):
        for table in filter(None, (make(result) for make in _STUDY_TABLES)):
            yield prefix + table.key, table
    for name, extra in zip(grid_names(material), material.grids, strict=True):
        yield name, best_points(extra.content)
    described = [extra.content for extra in material.heterogeneity]
    if len(described) > 1:
        yield "heterogeneity", side_by_side(described)
    for after, report in zip(numbered(described), described, strict=True):
        yield f"heterogeneity{after}", heterogeneity(report)
        yield f"heterogeneity-clients{after}", client_by_client(report)


def write_description(
    report: Mapping[str, Any], paper: Mapping[str, Any] | None, folder: Path
) -> None:
    """Write everything as JSON, a line per client as CSV, and the figure.

    Args:
        report: dictionary of a :class:`fedzmg.data.heterogeneity.Report`.
        paper: the paper's numbers, marked beside the clients.
        folder: their directory; it is made.

    Raises:
        InputError: if a file cannot be written.
    """
    from fedzmg.report import figures

    by_client = Table("", "", (), [], records=report["clients"])
    write(folder / DESCRIPTION[0], (json.dumps(report, allow_nan=False) + "\n").encode())
    write(folder / DESCRIPTION[1], to_csv(by_client).encode())
    figures.save(figures.heterogeneity(report, paper), folder / "heterogeneity")


def write_theory_figures(findings: Sequence[Finding], out: Path) -> list[Path]:
    """Write every figure of the checks as PNG and SVG and return their paths.

    Raises:
        InputError: if one cannot be written.
    """
    from fedzmg.report.figures import save, theory

    drawn = [item for finding in findings for item in theory(finding).items()]
    return [path for name, chart in drawn for path in save(chart, out / name)]


def write_theory_page(findings: Sequence[Finding], path: Path) -> None:
    """Write the page of the checks.

    Raises:
        InputError: if it cannot be written.
    """
    from fedzmg.report.html.page import theory_page

    write(path, theory_page(findings).encode(), "choose another file")
