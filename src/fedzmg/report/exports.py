"""Tables and figures of a report as files of their own: for papers, slides and spreadsheets.

Tables are written as Markdown, LaTeX and CSV (with full precision), figures as PNG, SVG and PDF.
The same outcome gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedzmg.errors import InputError
from fedzmg.files import write_atomic
from fedzmg.report import paper
from fedzmg.report.formats import comma_separated, latex, markdown
from fedzmg.report.numbers import slug
from fedzmg.report.outcome import Outcome
from fedzmg.report.page import render
from fedzmg.report.reading import Material
from fedzmg.report.sections.grids import name_of
from fedzmg.report.sheets import costs, scores
from fedzmg.report.sheets.beside_paper import beside_paper
from fedzmg.report.sheets.clients import clients
from fedzmg.report.sheets.heterogeneity import heterogeneity
from fedzmg.report.sheets.paired_tests import paired_tests
from fedzmg.report.sheets.sheet import Sheet

PAGE = "report.html"
SHEETS: tuple[Callable[[Outcome], Sheet | None], ...] = (
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


def write(material: Material, outcomes: Sequence[Outcome], out: Path) -> Path:
    """Write the page.

    Args:
        material: what was read.
        outcomes: an outcome for each study.
        out: a directory; it is made.

    Returns:
        The page's path.

    Raises:
        InputError: if it cannot be written.
    """
    path = out / PAGE
    _write(path, render(material, outcomes).encode())
    return path


def write_tables(material: Material, outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Write every table three times, below ``tables``.

    Raises:
        InputError: if one cannot be written.
    """
    written = []
    for name, sheet in _sheets(material, outcomes):
        for suffix, make in _FORMATS.items():
            path = out / "tables" / f"{name}.{suffix}"
            _write(path, make(sheet).encode())
            written.append(path)
    return written


def write_figures(material: Material, outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Write every figure as PNG, SVG and PDF, below ``figures``.

    Raises:
        InputError: if one cannot be written.
    """
    # Drawing takes its time to load, and a page alone does not need it.
    from fedzmg.report import grids, plots
    from fedzmg.report.style import FORMATS, rendered

    written = []
    jobs: list[tuple[str, Any]] = []
    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        jobs += [(prefix + name, figure) for name, figure in plots.study_figures(outcome)]
    for i, extra in enumerate(material.grids):
        several = len(material.grids) > 1
        before = f"grid{i + 1}-{slug(name_of(extra.content))}-" if several else "grid-"
        data = {**extra.content, "task": paper.shown(str(extra.content["task"]))}
        jobs += [(before + slug(name), grids.figure(data, name)) for name in data["algorithms"]]
    for stem, figure in jobs:
        for suffix in FORMATS:
            path = out / "figures" / f"{stem}.{suffix}"
            _write(path, rendered(figure, suffix))
            written.append(path)
    return written


def _sheets(material: Material, outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Sheet]]:
    for prefix, outcome in zip(_prefixes(outcomes), outcomes, strict=True):
        for make in SHEETS:
            sheet = make(outcome)
            if sheet is not None:
                yield prefix + sheet.key, sheet
    for i, extra in enumerate(material.heterogeneity):
        after = f"-{i + 1}" if len(material.heterogeneity) > 1 else ""
        yield f"heterogeneity{after}", heterogeneity(extra.content)


def _prefixes(outcomes: Sequence[Outcome]) -> list[str]:
    """What tells the files of several studies apart."""
    if len(outcomes) == 1:
        return [""]
    return [f"{i + 1}-{slug(outcome.study.name)}-" for i, outcome in enumerate(outcomes)]


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}; choose another place with --out"
        ) from None
