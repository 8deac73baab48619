"""A section per study; ``BLOCKS`` says what it holds, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from fedzmg.report.html.blocks import (
    Block,
    Notes,
    Pairs,
    Section,
    StudyBlocks,
    Table,
    Tile,
    Tiles,
)
from fedzmg.report.html.sections import charts, clients
from fedzmg.report.tables import costs, scores
from fedzmg.report.tables.beside_paper import beside_paper
from fedzmg.report.tables.paired_tests import paired_tests
from fedzmg.report.tables.sheet import Sheet
from fedzmg.results import paper
from fedzmg.results.averaging import averaged_words
from fedzmg.results.formatting import bytes_text, count_text, goal_text, setting_text, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.reading import Material
from fedzmg.results.scores import RULES
from fedzmg.results.study_result import StudyResult


def sections(material: Material, outcomes: Sequence[StudyResult]) -> Iterator[Section]:
    """One section per study."""
    del material
    for i, outcome in enumerate(outcomes):
        key = f"s{i}"
        blocks = (block for make in BLOCKS for block in make(outcome, key))
        yield Section(key, outcome.study.name, _facts(outcome.study), tuple(blocks))


def _facts(study: Study) -> str:
    seeds = {run.seed for run in study.runs}
    rounds = study.protocol.get("rounds")
    begun, asked = len(study.members), len({*study.members, *study.awaited})
    parts = [
        count_text(begun, "algorithm") if begun == asked else f"{begun} of {asked} algorithms",
        count_text(len(seeds), "paired seed" if len(study.members) > 1 else "seed"),
        *([f"{rounds:,} rounds"] if rounds else []),
    ]
    clients = study.runs[0].manifest.get("clients")
    cohort = study.protocol.get("cohort")
    if clients and cohort:
        parts.append(f"{cohort} of {clients:,} clients a round")
    return ", ".join(parts)


def _tiles(outcome: StudyResult, key: str) -> Iterator[Block]:
    del key
    study = outcome.study
    if not outcome.ranked:
        return
    best = outcome.ranked[0]
    spread = "" if best.sd is None else f" (± {value_text(best.sd, study.metric)})"
    value = value_text(best.mean, study.metric)
    tiles = [Tile(f"Best final {study.metric}", value, best.label + spread)]
    if study.threshold is not None:
        tiles.append(_first(outcome, study.threshold))
    if outcome.tests:
        held = [score for score in outcome.scores if score.test is not None]
        won = sum(score.significant for score in held)
        note = f"from {study.reference}, after Holm"
        tiles.append(Tile("Significant differences", f"{won} of {len(held)}", note))
    yield Tiles((*tiles, _moved(outcome)))


def _first(outcome: StudyResult, threshold: float) -> Tile:
    """Who held the threshold first."""
    study = outcome.study
    title = f"First to hold {goal_text(threshold, study.metric)}"
    means = averaged_words(study.window)
    found = [(s.arrivals[RULES[0]], s.label) for s in outcome.scores if s.finals]
    arrived = [(index, label) for index, label in found if index is not None]
    if not arrived:
        return Tile(title, "none", means)
    first = min(index for index, _ in arrived)
    labels = [label for index, label in arrived if index == first]
    who = labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
    return Tile(title, f"index {first:,}", f"{who}, {means}")


def _moved(outcome: StudyResult) -> Tile:
    """What a run moved."""
    sizes = [(score.traffic["total"], score.label) for score in outcome.scores if score.finals]
    (least, who), (most, _) = min(sizes), max(sizes)
    note = "the same for all" if len(sizes) == len(outcome.scores) else "finished runs"
    if not math.isclose(least, most, rel_tol=1e-3):
        note = f"least, {who}; most {bytes_text(most)}"
    return Tile("Traffic of a run", bytes_text(least), note)


def _open(make: Callable[[StudyResult], Sheet | None]) -> StudyBlocks:
    def blocks(outcome: StudyResult, key: str) -> Iterable[Block]:
        del key
        sheet = make(outcome)
        return [] if sheet is None else [Table(sheet)]

    return blocks


def _folded(make: Callable[[StudyResult], Sheet], title: str) -> StudyBlocks:
    def blocks(outcome: StudyResult, key: str) -> Iterable[Block]:
        del key
        return [Table(make(outcome), title, folded=True)]

    return blocks


def _notes(outcome: StudyResult, key: str) -> Iterator[Block]:
    del key
    notes = list(outcome.notes)
    if outcome.study.task not in paper.COUNTERPARTS:
        task = outcome.study.task
        notes.append(f"The paper has no numbers for {task}, so none stand beside these.")
    if notes:
        yield Notes("", tuple(notes))


def _settings(outcome: StudyResult, key: str) -> Iterator[Block]:
    del key
    spec = outcome.study.runs[0].spec
    tables = {**spec.get("preset", {}), **spec.get("protocol", {})}
    pairs = ((name.replace("_", " "), setting_text(value)) for name, value in tables.items())
    yield Pairs("Settings", tuple(pairs))
    yield Table(costs.settings(outcome), "Hyper-parameters used")


BLOCKS: tuple[StudyBlocks, ...] = (
    _tiles,
    _open(scores.scores),
    _open(paired_tests),
    _open(scores.thresholds),
    _open(beside_paper),
    _notes,
    charts.panels,
    charts.charts,
    clients.clients,
    _folded(scores.finals, "Final value of every seed"),
    _folded(costs.traffic, "Traffic of one run"),
    _settings,
)
