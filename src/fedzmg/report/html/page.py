"""One self-contained page: words, tables and charts of what run directories hold.

It needs no network, no other file and no script; the same directories give the same bytes.
``SECTIONS`` says what is on it and in which order; what a study's section holds is in
:data:`fedzmg.report.html.sections.study.BLOCKS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedzmg.report.html.blocks import Section
from fedzmg.report.html.environment import environment
from fedzmg.report.html.sections import again, grids, heterogeneity, study
from fedzmg.results import paper
from fedzmg.results.formatting import count_text
from fedzmg.results.grids import axes_of, name_of
from fedzmg.results.reading import Material
from fedzmg.results.study_result import StudyResult, study_result
from fedzmg.results.summary import summary
from fedzmg.version import __version__

SECTIONS: tuple[Callable[[Material, Sequence[StudyResult]], Iterable[Section]], ...] = (
    study.sections,
    grids.sections,
    heterogeneity.sections,
    again.sections,
)


def render(material: Material, outcomes: Sequence[StudyResult] | None = None) -> str:
    """Make the page.

    Args:
        material: what was read.
        outcomes: the studies' outcomes, if they are known already.
    """
    outcomes = [study_result(study) for study in material.studies] if outcomes is None else outcomes
    templates = environment()
    templates.filters["unbroken"] = lambda text: str(text).replace(" %", "\u00a0%")
    searched = [extra.content for extra in material.grids]
    text = templates.get_template("page.html.jinja").render(
        title=_title(material),
        names=material.names,
        version=__version__,
        summaries=[" ".join(summary(outcome, searched)) for outcome in outcomes]
        or _without_runs(material),
        sections=[section for make in SECTIONS for section in make(material, outcomes)],
    )
    # What the templates leave between tags is of no use to anybody.
    return re.sub(r"\n\s*\n+", "\n", text)


def _without_runs(material: Material) -> list[str]:
    """What is on a page about no runs."""
    words = []
    for extra in material.grids:
        entries = list(extra.content["algorithms"].values())
        points = sum(len(entry["points"]) for entry in entries)
        words.append(
            f"A grid over {' and '.join(axes_of(extra.content))} on {name_of(extra.content)}: "
            f"{count_text(points, 'point')}, {count_text(len(entries), 'algorithm')}."
        )
    if material.heterogeneity:
        sets = count_text(len(material.heterogeneity), "data set")
        words.append(f"The clients of {sets}, described by what they hold; nothing is trained.")
    return words or ["Nothing can be shown yet: the last section says why."]


def _title(material: Material) -> str:
    searched = [extra.content for extra in material.grids]
    subjects = [study.name for study in material.studies] or [_subject(one) for one in searched]
    if len(set(subjects)) == 1:
        return f"Federated learning on {subjects[0]}"
    tasks = [study.task for study in material.studies] or [
        str(one.get("task") or "") for one in searched
    ]
    if not tasks and material.heterogeneity:
        described = [str(extra.content["name"]) for extra in material.heterogeneity]
        return "How much clients differ: " + ", ".join(described)
    shown = [paper.shown(task) for task in dict.fromkeys(tasks) if task] or list(material.names)
    return "Federated learning on " + ", ".join(shown[:3]) + (" and more" if shown[3:] else "")


def _subject(grid: Mapping[str, Any]) -> str:
    """What a grid is about, in the words that studies have for it."""
    task, label = paper.shown(str(grid.get("task", ""))), grid.get("label")
    return f"{task}, {label}" if label else task
