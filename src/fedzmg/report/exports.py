"""Files of reports and of descriptions of data; the same results give the same bytes."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedzmg.plain_text import printable
from fedzmg.report.tables import study
from fedzmg.report.tables.clients import clients, own_models, uploads
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import Report, client_by_client, heterogeneity, side_by_side
from fedzmg.report.tables.table import Table, to_csv, to_json, to_latex, to_markdown
from fedzmg.report.writing import check_place, refuse_foreign, replace_files, write
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult

PAGE = "report.html"
DESCRIPTION = tuple(f"heterogeneity.{suffix}" for suffix in ("json", "csv", "png", "svg"))
_STUDY_TABLES: tuple[Callable[[StudyResult], Table | None], ...] = (
    study.scores, study.paired_tests, study.thresholds, study.beside_paper, clients,
    own_models, study.finals, study.traffic, study.settings, uploads,
)  # fmt: skip
_FORMATS = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "json": to_json}


def publish(
    material: Material, results: Sequence[StudyResult], out: Path, *, page_only: bool = False
) -> tuple[list[str], list[str]]:
    """Replace an earlier report; return the names of files written and removed."""
    check_place(out)
    # Before the long work; the names of tables and figures are known only after it.
    refuse_foreign(out, [PAGE])
    from fedzmg.report.figures import FORMATS, draw, rendered  # matplotlib takes time to load
    from fedzmg.report.html.page import render

    drawn = draw(material, results)
    files = {PAGE: render(material, results, drawn).encode()}
    if not page_only:
        files |= dict(tables(material, results))
        for stem, chart in drawn.items():
            files |= {f"figures/{stem}.{suffix}": rendered(chart, suffix) for suffix in FORMATS}
    return list(files), replace_files(out, files)


def tables(material: Material, results: Sequence[StudyResult]) -> Iterator[tuple[str, bytes]]:
    """Yield every table in four formats: file name below ``tables``, and content."""
    from fedzmg.report.figures import by_prefix

    found: dict[str, Table] = {}
    for prefix, result in by_prefix(results).items():
        made = filter(None, (make(result) for make in _STUDY_TABLES))
        found |= {prefix + table.key: table for table in made}
    for name, grid in material.grids.items():
        found[name] = best_points(grid)
    if len(material.heterogeneity) > 1:
        found["heterogeneity"] = side_by_side([*material.heterogeneity.values()])
    for suffix, report in material.heterogeneity.items():
        found[f"heterogeneity{suffix}"] = heterogeneity(report)
        found[f"heterogeneity-clients{suffix}"] = client_by_client(report)
    for name, table in found.items():
        for suffix, make in _FORMATS.items():
            yield f"tables/{name}.{suffix}", printable(make(table)).encode()


def write_description(report: Report, paper: Report | None, folder: Path) -> None:
    """Write a heterogeneity report as JSON, a line per client as CSV, and the figure."""
    from fedzmg.report import figures

    by_client = Table("", "", (), [], records=report["clients"])
    write(folder / DESCRIPTION[0], (json.dumps(report, allow_nan=False) + "\n").encode())
    write(folder / DESCRIPTION[1], to_csv(by_client).encode())
    figures.save(figures.heterogeneity(report, paper), folder / "heterogeneity")
