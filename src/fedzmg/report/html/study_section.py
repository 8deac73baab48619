"""Sections of studies: tiles, tables, figures, notes and settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fedzmg.report.figures import STUDY_FIGURES, Chart, study_prefixes
from fedzmg.report.html.blocks import (
    Block,
    Notes,
    Pairs,
    Section,
    TableBlock,
    Tile,
    Tiles,
    arranged,
    picture,
)
from fedzmg.report.tables import costs, scores
from fedzmg.report.tables.beside_paper import beside_paper
from fedzmg.report.tables.clients import clients
from fedzmg.report.tables.paired_tests import paired_tests
from fedzmg.results import paper
from fedzmg.results.averaging import averaged_words
from fedzmg.results.formatting import bytes_text, count_text, goal_text, setting_text, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.scores import RULES
from fedzmg.results.study_result import StudyResult


def sections(results: Sequence[StudyResult], drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section per study."""
    for i, (prefix, result) in enumerate(zip(study_prefixes(results), results, strict=True)):
        own = {name: drawn[prefix + name] for name in STUDY_FIGURES if prefix + name in drawn}
        blocks = tuple(_blocks(result, own, f"s{i}"))
        yield Section(f"s{i}", result.study.name, _facts(result.study), blocks)


def _blocks(result: StudyResult, charts: Mapping[str, Chart], key: str) -> Iterator[Block]:
    if result.ranked:
        yield Tiles(tuple(_tiles(result)))
    pictures = {name: picture(chart, f"{key}-{name}") for name, chart in charts.items()}
    if "curves" in pictures:
        yield arranged([pictures.pop("curves")])
    for make in (scores.scores, paired_tests, scores.thresholds, beside_paper):
        table = make(result)
        if table is not None:
            yield TableBlock(table)
    notes = list(result.notes)
    if result.study.task not in paper.COUNTERPARTS:
        notes.append(f"The paper has no numbers for {result.study.task}.")
    yield Notes("", tuple(notes))
    of_clients = [name for name in pictures if name.startswith("client")]
    yield arranged(one for name, one in pictures.items() if name not in of_clients)
    table = clients(result)
    if table is not None:
        yield TableBlock(table, "Clients")
    yield Notes("", tuple(_missing(result)))
    yield arranged(pictures[name] for name in of_clients)
    yield TableBlock(scores.finals(result), "Final value of every seed", folded=True)
    yield TableBlock(costs.traffic(result), "Traffic of one run", folded=True)
    spec = result.study.runs[0].spec
    tables = {**spec.get("preset", {}), **spec.get("protocol", {})}
    pairs = ((name.replace("_", " "), setting_text(value)) for name, value in tables.items())
    yield Pairs("Settings", tuple(pairs))
    yield TableBlock(costs.settings(result), "Hyper-parameters used")


def _facts(study: Study) -> str:
    seeds = {run.seed for run in study.runs}
    rounds = study.protocol.get("rounds")
    begun, asked = len(study.members), len({*study.members, *study.awaited})
    parts = [
        count_text(begun, "algorithm") if begun == asked else f"{begun} of {asked} algorithms",
        count_text(len(seeds), "paired seed" if len(study.members) > 1 else "seed"),
        *([f"{rounds:,} rounds"] if rounds else []),
    ]
    population = study.runs[0].manifest.get("clients")
    cohort = study.protocol.get("cohort")
    if population and cohort:
        parts.append(f"{cohort} of {population:,} clients a round")
    return ", ".join(parts)


def _tiles(result: StudyResult) -> Iterator[Tile]:
    study, best = result.study, result.ranked[0]
    spread = "" if best.sd is None else f" (± {value_text(best.sd, study.metric)})"
    value = value_text(best.mean, study.metric)
    yield Tile(f"Best final {study.metric}", value, best.label + spread)
    if study.threshold is not None:
        yield _first(result, study.threshold)
    if result.tests:
        tested = [score for score in result.scores if score.test is not None]
        won = sum(score.significant for score in tested)
        note = f"from {study.reference}, after Holm"
        yield Tile("Significant differences", f"{won} of {len(tested)}", note)
    sizes = [(score.traffic["total"], score.label) for score in result.scores if score.finals]
    (least, who), (most, _) = min(sizes), max(sizes)
    note = "the same for all" if len(sizes) == len(result.scores) else "finished runs"
    if not math.isclose(least, most, rel_tol=1e-3):
        note = f"least, {who}; most {bytes_text(most)}"
    yield Tile("Traffic of a run", bytes_text(least), note)


def _first(result: StudyResult, threshold: float) -> Tile:
    """Name the algorithm that held the threshold first."""
    study = result.study
    title = f"First to hold {goal_text(threshold, study.metric)}"
    means = averaged_words(study.window)
    found = [(s.arrivals[RULES[0]], s.label) for s in result.scores if s.finals]
    arrived = [(round_, label) for round_, label in found if round_ is not None]
    if not arrived:
        return Tile(title, "none", means)
    first = min(round_ for round_, _ in arrived)
    labels = [label for round_, label in arrived if round_ == first]
    who = labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")
    return Tile(title, f"round {first:,}", f"{who}, {means}")


def _missing(result: StudyResult) -> Iterator[str]:
    """Count the runs without data about single clients."""
    runs = result.study.runs
    for missing, words in (
        (
            [run for run in runs if run.clients is None],
            "have no metric by client (clients.safetensors), which is written when a run ends",
        ),
        (
            [run for run in runs if not any(run.log.client_loss)],
            "have no training losses by client, which older versions did not keep",
        ),
        (
            [run for run in runs if run.clients is not None and run.diverged is not None],
            "diverged and are left out here",
        ),
    ):
        if missing:
            number = "all" if len(missing) == len(runs) else f"{len(missing)} of {len(runs)}"
            yield f"Clients: {number} runs {words}."
