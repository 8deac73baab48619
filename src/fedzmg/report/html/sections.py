"""Sections of studies, grids and heterogeneity, and how to reproduce them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedzmg.report.figures import STUDY_FIGURES, Chart, by_prefix
from fedzmg.report.tables import study as tables
from fedzmg.report.tables.clients import clients, devices, own_models, uploads
from fedzmg.report.tables.grids import best_points
from fedzmg.report.tables.heterogeneity import client_by_client, heterogeneity, side_by_side
from fedzmg.report.tables.table import Column, Table
from fedzmg.results import formatting as fmt
from fedzmg.results import paper
from fedzmg.results.reading import Material, Study, name_of
from fedzmg.results.runs import Run
from fedzmg.results.scores import RULES, averaged_words
from fedzmg.results.study_result import StudyResult

_DIRECTORY_COLUMNS = (
    Column("directory", "", "shown"),
    Column("rounds", "", lambda run: f"{run.done:,} of {run.asked or '?'}"),
    Column("diverged in", "", "diverged", "round {:,}".format),
    Column("engine", "", lambda run: str(run.manifest.get("engine", fmt.NONE))),
    Column("seconds", "", "seconds", "{:,.1f}".format),
)
_FACTS = (
    "fedzmg", "commit", "dirty", "python", "torch", "numpy", "platform", "device", "device_name",
    "threads", "parallel", "dtype", "precision", "engine", "not_projected", "clients", "examples",
    "data_sha256", "task_sha256",
)  # fmt: skip


class Block(NamedTuple):
    """A part of a section, drawn by the template; none if it is empty."""

    kind: str  # ``commands``, ``notes``, ``pairs``, ``pictures``, ``table``, ``text`` or ``tiles``
    content: Any
    title: str = ""  # heading; by default the title of a table
    style: str = ""
    folded: bool = False


class Section(NamedTuple):
    """A part of the page with an anchor."""

    key: str
    title: str
    facts: str
    blocks: Iterable[Block]


def of_studies(results: Sequence[StudyResult], drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section per study."""
    for i, (prefix, result) in enumerate(by_prefix(results).items()):
        own = {name: drawn[prefix + name] for name in STUDY_FIGURES if prefix + name in drawn}
        yield Section(f"s{i}", result.study.name, _facts(result.study), _blocks(result, own))


def _blocks(result: StudyResult, charts: dict[str, Chart]) -> Iterator[Block]:
    yield Block("tiles", list(_tiles(result)))
    yield Block("pictures", [charts.pop("curves")] if "curves" in charts else [])
    for make in (tables.scores, tables.paired_tests, tables.thresholds, tables.beside_paper):
        yield Block("table", make(result))
    yield Block("notes", result.notes)
    yield Block("table", uploads(result), "Unusual uploads")
    yield Block("table", devices(result), "Devices")
    of_clients = [charts.pop(name) for name in list(charts) if name.startswith("client")]
    yield Block("pictures", list(charts.values()))
    yield Block("table", clients(result), "Clients")
    yield Block("table", own_models(result))
    yield Block("notes", list(_missing(result)))
    yield Block("pictures", of_clients)
    yield Block("table", tables.finals(result), "Final value of every seed", folded=True)
    yield Block("table", tables.traffic(result), "Traffic of one run", folded=True)
    spec = result.study.runs[0].spec
    used = {**spec.get("preset", {}), **spec.get("protocol", {})}
    used |= {f"participation: {key}": v for key, v in result.study.participation.items()}
    pairs = [(name.replace("_", " "), fmt.setting_text(value)) for name, value in used.items()]
    yield Block("pairs", pairs, "Settings")
    yield Block("table", tables.settings(result), "Hyper-parameters used")


def _facts(study: Study) -> str:
    rounds, cohort = study.protocol.get("rounds"), study.protocol.get("cohort")
    begun, asked = len(study.members), len({*study.members, *study.awaited})
    population = study.runs[0].manifest.get("clients")
    parts = [
        fmt.count_text(begun, "algorithm") if begun == asked else f"{begun} of {asked} algorithms",
        fmt.count_text(len(study.seeds), "paired seed" if begun > 1 else "seed"),
    ]
    parts += [f"{rounds:,} rounds"] if rounds else []
    if population and cohort and not study.participation:  # which the settings show
        parts.append(f"{cohort} of {population:,} clients a round")
    return ", ".join(parts)


def _tiles(result: StudyResult) -> Iterator[tuple[str, str, str]]:
    if not result.ranked:
        return
    study, best = result.study, result.ranked[0]
    final = fmt.value_text(best.mean, study.metric)
    spread = "" if best.sd is None else f" (± {fmt.value_text(best.sd, study.metric)})"
    yield f"Best final {study.metric}", final, best.label + spread
    if study.threshold is not None:
        reached = {s.label: s.arrivals[RULES[0]] or math.inf for s in result.scores if s.finals}
        first = min(reached.values())
        who = " and ".join(label for label, one in reached.items() if one == first)
        found = ("none", "") if first == math.inf else (f"round {first:,}", f"{who}, ")
        title = f"First to hold {fmt.goal_text(study.threshold, study.metric)}"
        yield title, found[0], found[1] + averaged_words(study.window)
    if result.tests:
        tested = [score for score in result.scores if score.test is not None]
        won = sum(score.significant for score in tested)
        note = f"from {study.reference}, after Holm"
        yield "Significant differences", f"{won} of {len(tested)}", note
    sizes = [score.traffic["total"] for score in result.scores if score.finals]
    note = "least of all algorithms" if max(sizes) > 1.001 * min(sizes) else "the same for all"
    yield "Traffic of a run", fmt.bytes_text(min(sizes)), note


def _missing(result: StudyResult) -> Iterator[str]:
    runs = result.study.runs
    without = sum(not run.clients for run in runs)
    diverged = sum(bool(run.clients) and run.diverged is not None for run in runs)
    if without:
        yield f"Clients: {without} of {len(runs)} runs have no metric by client yet."
    if diverged:
        yield f"Clients: {diverged} of {len(runs)} runs diverged and are left out here."


def of_grids(material: Material, drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section for all grids."""
    if not material.grids:
        return
    blocks = []
    for stem, data in material.grids.items():
        stems = [f"{stem}-{fmt.slug(name)}" for name in data["algorithms"]]
        made = data["directory"] + " \u00b7 not finished yet" * (not data["complete"])
        blocks += [
            Block("text", made, name_of(data), "facts"),
            Block("pictures", [drawn[own] for own in stems if own in drawn]),
            Block("table", best_points(data), "Best points"),
        ]
    yield Section("grids", "Grids", "Stronger colours are better. Framed: the choice.", blocks)


def of_heterogeneity(material: Material, drawn: Mapping[str, Chart]) -> Iterator[Section]:
    """Make one section for all data sets."""
    reports = material.heterogeneity
    if not reports:
        return
    blocks = [Block("table", side_by_side([*reports.values()]))] if len(reports) > 1 else []
    for suffix, report in reports.items():
        stem = f"heterogeneity{suffix}"
        blocks += [
            Block("table", heterogeneity(report), paper.shown(str(report["name"]))),
            Block("pictures", [drawn[stem]] if stem in drawn else []),
            Block("table", client_by_client(report) if report.get("clients") else None),
        ]
    yield Section("heterogeneity", "Heterogeneity", "", blocks)


def reproduction(material: Material) -> Section:
    """Make the section of left-out runs, commands and environment."""
    # Grids first: studies take their rates from them.
    runs = [run.manifest for study in material.studies for run in study.runs]
    made = [*material.searches, *runs]
    made += [one.get("made", {}) for one in material.heterogeneity.values()]
    recorded = [facts.get("command") for facts in made]
    words = [" ".join(one) if isinstance(one, list) else str(one) for one in recorded if one]
    lines = list(dict.fromkeys(words))
    blocks = [
        Block("notes", material.notes, "Left out"),
        Block("commands", lines, "Commands as recorded", folded=len(lines) > 6),
    ]
    for study in material.studies:
        which = f" of {study.name}" if len(material.studies) > 1 else ""
        table = Table.build("", "", _DIRECTORY_COLUMNS, study.runs, words=4)
        facts, title = _circumstances(study.runs), f"Versions, machine and data{which}"
        blocks += [
            Block("pairs", facts, title, "long"),
            Block("table", table, f"{len(study.runs)} run directories", folded=True),
        ]
    return Section("reproduce", "How to reproduce", "", blocks)


def _circumstances(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """List versions, machine, commit and data with all values they had."""
    found = []
    for fact in _FACTS:
        values = [run.manifest[fact] for run in runs if run.manifest.get(fact) is not None]
        if values:
            texts = [f"{v:,}" if type(v) is int else fmt.setting_text(v) for v in values]
            name = "uncommitted changes" if fact == "dirty" else fact.replace("_", " ")
            found.append((name, ", ".join(dict.fromkeys(texts))))
    plugins = {n: o for run in runs for n, o in run.manifest.get("plugins", {}).items()}
    for name, origin in plugins.items():
        words = (origin.get(key) for key in ("distribution", "file", "sha256"))
        found.append((f"source of {name}", ", ".join(filter(None, words))))
    started = sorted(str(r.manifest["started"]) for r in runs if r.manifest.get("started"))
    spent = sum(run.seconds for run in runs)
    if spent:
        found.append(("time of all rounds", f"{spent:,.0f} s"))
    if started:
        found.append(("started", " to ".join(dict.fromkeys((started[0], started[-1])))))
    return found
