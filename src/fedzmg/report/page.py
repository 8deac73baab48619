"""One self-contained page: words, tables and charts of what run directories hold.

It needs no network, no other file and no script; the same directories give the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fedzmg.data.heterogeneity import PAPER
from fedzmg.report import paper, sheets, svg
from fedzmg.report.outcome import (
    MIB,
    RULES,
    Outcome,
    Score,
    judge,
    p_text,
    summary,
    value_text,
)
from fedzmg.report.reading import Extra, Material, Run, Study
from fedzmg.report.sheets import Sheet
from fedzmg.report.svg import MINUS, NONE
from fedzmg.version import __version__

MOST_IN_ONE_CHART = 8
MOST_SCATTERED = 4000
MOST_LISTED = 12
_HETEROGENEITY_TWINS = {
    "emnist62": "emnist62", "chars74k": "emnist62", "cifar100": "cifar100",
    "shakespeare": "shakespeare", "shakespeare-by-role": "shakespeare",
}  # fmt: skip


class Entry(NamedTuple):
    """A line of a legend."""

    swatch: Markup
    label: str


class Chart(NamedTuple):
    """A figure with its words."""

    key: str
    title: str
    lead: str
    """A sentence under the title."""
    drawing: Markup
    legend: tuple[Entry, ...] = ()
    always: bool = False
    """Whether the legend is needed on a wide page, too."""


class Panel(NamedTuple):
    """One of many small charts."""

    title: str
    drawing: Markup
    legend: tuple[Entry, ...]


class Tile(NamedTuple):
    """A number worth standing out."""

    head: str
    value: str
    note: str


class Section(NamedTuple):
    """A study on the page."""

    key: str
    name: str
    facts: str
    summary: str
    tiles: tuple[Tile, ...]
    charts: tuple[Chart, ...]
    panels: tuple[Panel, ...]
    panels_lead: str
    background: Markup
    scores: Sheet
    thresholds: Sheet | None
    paper: Sheet | None
    finals: Sheet
    traffic: Sheet
    settings: Sheet
    protocol: tuple[tuple[str, str], ...]
    circumstances: Sheet
    runs: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]


class GridMap(NamedTuple):
    """The grid of one algorithm."""

    name: str
    best: str
    warning: str
    drawing: Markup | None
    rows: tuple[tuple[str, str], ...]


def render(material: Material, outcomes: Sequence[Outcome] | None = None) -> str:
    """Make the page.

    Args:
        material: what was read.
        outcomes: the studies' outcomes, if they are known already.
    """
    outcomes = [judge(study) for study in material.studies] if outcomes is None else outcomes
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedzmg.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["unbroken"] = lambda text: str(text).replace(" %", "\u00a0%")
    sections = [_section(outcome, i) for i, outcome in enumerate(outcomes)]
    text = environment.get_template("page.html.jinja").render(
        title=_title(material),
        names=material.names,
        version=__version__,
        sections=sections,
        grids=[_grid(extra, i) for i, extra in enumerate(material.grids)],
        heterogeneity=[_heterogeneity(extra, i) for i, extra in enumerate(material.heterogeneity)],
        notes=material.notes,
        commands=_commands(material),
    )
    # What the templates leave between tags is of no use to anybody.
    return re.sub(r"\n\s*\n+", "\n", text)


def slug(name: str) -> str:
    """A name for files and anchors.

    >>> slug("fedadam:reddi (lr 0.1)")
    'fedadam-reddi-lr-0.1'
    """
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


def _title(material: Material) -> str:
    tasks = list(dict.fromkeys(study.task for study in material.studies))
    tasks = tasks or list(dict.fromkeys(str(e.content.get("task", "")) for e in material.grids))
    tasks = [task for task in tasks if task] or list(material.names)
    shown = ", ".join(tasks[:3]) + (" and more" if len(tasks) > 3 else "")
    return f"Federated learning on {shown}"


def _section(outcome: Outcome, position: int) -> Section:
    study = outcome.study
    key = f"s{position}"
    charts: list[Chart] = []
    by_traffic: list[Chart] = []
    panels: tuple[Panel, ...] = ()
    panels_lead, background = "", Markup("")
    if any(score.curve is not None for score in outcome.scores):
        if len(outcome.scores) <= MOST_IN_ONE_CHART:
            charts.append(_learning(outcome, key))
            by_traffic.append(_against_traffic(outcome, key))
        else:
            panels, background = _panels(outcome, key)
            panels_lead = _curve_words(outcome) + " Grey: all the others."
            by_traffic += _final_by_traffic(outcome, key)
    charts += _differences(outcome, key) + _seeds(outcome, key)
    charts += by_traffic + _trouble(outcome, key)
    return Section(
        key=key,
        name=study.name,
        facts=_facts(study),
        summary=" ".join(summary(outcome)),
        tiles=_tiles(outcome),
        charts=tuple(charts),
        panels=panels,
        panels_lead=panels_lead,
        background=background,
        scores=sheets.scores(outcome),
        thresholds=sheets.thresholds(outcome),
        paper=sheets.beside_paper(outcome),
        finals=sheets.finals(outcome),
        traffic=sheets.traffic(outcome),
        settings=sheets.settings(outcome),
        protocol=_protocol(study),
        circumstances=sheets.circumstances(study.runs),
        runs=tuple(_run_line(run) for run in study.runs),
        notes=(*outcome.notes, *_paper_note(outcome)),
    )


def _facts(study: Study) -> str:
    seeds = {run.seed for run in study.runs}
    rounds = study.protocol.get("rounds")
    parts = [
        _count(len(study.members), "algorithm"),
        _count(len(seeds), "paired seed" if len(study.members) > 1 else "seed"),
        *([f"{rounds:,} rounds"] if rounds else []),
    ]
    clients = study.runs[0].manifest.get("clients")
    cohort = study.protocol.get("cohort")
    if clients and cohort:
        parts.append(f"{cohort} of {clients:,} clients a round")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _tiles(outcome: Outcome) -> tuple[Tile, ...]:
    study, ranked = outcome.study, outcome.ranked
    if not ranked:
        return ()
    best = ranked[0]
    spread = "" if best.sd is None else f" (± {value_text(best.sd, study.metric)})"
    value = value_text(best.mean, study.metric)
    tiles = [Tile(f"Best final {study.metric}", value, best.label + spread)]
    if study.threshold is not None:
        arrived = [
            (s.arrivals[RULES[0]], s.label)
            for s in outcome.scores
            if s.arrivals[RULES[0]] is not None
        ]
        goal = sheets.goal_text(study.threshold, study.metric)
        if arrived:
            rounds = min(r for r, _ in arrived if r is not None)
            first = [label for r, label in arrived if r == rounds]
            who = first[0] + (f" and {len(first) - 1} more" if len(first) > 1 else "")
            tiles.append(Tile(f"First to {goal}", f"{rounds:,} rounds", who))
        else:
            tiles.append(Tile(f"First to {goal}", "none", "not reached"))
    tests = [score for score in outcome.scores if score.test is not None]
    if tests:
        won = sum(score.significant for score in tests)
        tiles.append(
            Tile("Significant differences", f"{won} of {len(tests)}",
                 f"from {study.reference}, after Holm")
        )  # fmt: skip
    moved = [(s.traffic["total"], s.label) for s in outcome.scores]
    least, most = min(moved), max(moved)
    if math.isclose(least[0], most[0], rel_tol=1e-3):
        tiles.append(Tile("Traffic of a run", sheets.size_text(least[0]), "the same for all"))
    else:
        tiles.append(
            Tile("Traffic of a run", sheets.size_text(least[0]),
                 f"least, {least[1]}; most {sheets.size_text(most[0])}")
        )  # fmt: skip
    return tuple(tiles)


def _number(study: Study) -> svg.Number:
    return svg.percent if "accuracy" in study.metric else svg.plain


def _levels(outcome: Outcome) -> list[svg.Level]:
    study = outcome.study
    return [
        svg.Level(level, f"threshold {sheets.goal_text(level, study.metric)}")
        for level in study.thresholds
    ]


def _label(score: Score) -> str:
    if score.curve is not None and score.curve.broke_off:
        return f"{score.label} (diverged)"
    if score.diverged:
        return f"{score.label} ({score.diverged} diverged)"
    if score.unfinished and not score.finals:
        return f"{score.label} (unfinished)"
    return score.label


def _line(score: Score, style: int, *, by_traffic: bool = False) -> svg.Line:
    curve = score.curve
    if curve is None:
        return svg.Line(_label(score), style, (), ())
    x = curve.mib if by_traffic else curve.rounds
    spread = None if curve.spread is None else curve.spread.tolist()
    return svg.Line(_label(score), style, x.tolist(), curve.mean.tolist(), spread, curve.broke_off)


def _legend(scores: Sequence[Score]) -> tuple[Entry, ...]:
    return tuple(Entry(svg.swatch(i), _label(score)) for i, score in enumerate(scores))


def _curve_words(outcome: Outcome) -> str:
    counts = sorted({score.curve.averaged for score in outcome.scores if score.curve})
    if counts == [1]:
        return "One run each."
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Mean of {number} runs; the band is one standard deviation either way."


def _learning(outcome: Outcome, key: str) -> Chart:
    study = outcome.study
    title = f"Test {study.metric} by round"
    ends = "; ".join(
        f"{_label(s)} ends at {value_text(float(s.curve.mean[-1]), study.metric)}"
        for s in outcome.scores
        if s.curve is not None
    )
    frame = svg.Frame(
        f"{key}-curves", title, f"{title} on {study.name}: {ends}.", "communication round",
        f"test {study.metric}",
    )  # fmt: skip
    lines = [_line(score, i) for i, score in enumerate(outcome.scores)]
    drawing = svg.curves(
        lines, frame, levels=_levels(outcome), number=_number(study), size=svg.FULL
    )
    return Chart("curves", title, _curve_words(outcome), drawing, _legend(outcome.scores))


def _against_traffic(outcome: Outcome, key: str) -> Chart:
    study = outcome.study
    title = f"Test {study.metric} by traffic"
    frame = svg.Frame(
        f"{key}-traffic", title,
        f"{title} on {study.name}; the table of traffic has the totals.",
        "MiB moved, all clients, both ways", f"test {study.metric}",
    )  # fmt: skip
    lines = [_line(score, i, by_traffic=True) for i, score in enumerate(outcome.scores)]
    drawing = svg.curves(lines, frame, levels=_levels(outcome), number=_number(study), size=svg.LOW)
    lead = "What a round costs in bytes may differ: the further left, the cheaper."
    return Chart("traffic", title, lead, drawing, _legend(outcome.scores))


def _final_by_traffic(outcome: Outcome, key: str) -> list[Chart]:
    study = outcome.study
    points = [
        (score.label, score.traffic["total"] / MIB, score.mean)
        for score in outcome.ranked
        if score.mean is not None and math.isfinite(score.mean)
    ]
    if not points:
        return []
    title = f"Final {study.metric} by traffic"
    best = points[0]
    frame = svg.Frame(
        f"{key}-traffic", title,
        f"{len(points)} algorithms; the best, {best[0]}, moved {best[1]:,.0f} MiB.",
        "MiB moved in one run, all clients, both ways", f"final {study.metric}",
    )  # fmt: skip
    drawing = svg.scatter(points, frame, number=_number(study), named=True, size=svg.FULL)
    lead = (
        "A dot is an algorithm: high and left is good. Where names would collide, point at a dot."
    )
    return [Chart("traffic", title, lead, drawing)]


def _panels(outcome: Outcome, key: str) -> tuple[tuple[Panel, ...], Markup]:
    """A small chart per family, everything else behind it in grey."""
    study = outcome.study
    drawn = [score for score in outcome.scores if score.curve is not None]
    lines = [_line(score, 0) for score in drawn]
    levels, number = _levels(outcome), _number(study)
    limits = svg.panel_limits(lines, levels)
    families: dict[str, list[Score]] = {}
    for score in drawn:
        families.setdefault(score.label.partition(":")[0], []).append(score)
    background = f"{key}-all"
    panels = []
    for i, (family, members) in enumerate(families.items()):
        own = [_line(score, style) for style, score in enumerate(members)]
        ends = "; ".join(
            f"{line.label} ends at {value_text(line.y[-1], study.metric)}" for line in own
        )
        frame = svg.Frame(
            f"{key}-panel{i}", f"{family}: test {study.metric} by round", f"{ends}.", "round"
        )
        drawing = svg.panel(own, background, frame, limits, levels=levels, number=number)
        panels.append(Panel(family, drawing, _legend(members)))
    return tuple(panels), svg.background(lines, background, limits, number)


def _differences(outcome: Outcome, key: str) -> list[Chart]:
    study = outcome.study
    tested = [(i, s) for i, s in enumerate(outcome.scores) if s.test is not None]
    if not tested:
        return []
    dots = []
    for i, score in sorted(tested, key=lambda entry: entry[1].test.mean_difference):  # type: ignore[union-attr]
        test = score.test
        assert test is not None
        # Shown as the other minus the reference: to the right is better than the reference.
        dots.append(
            svg.Dots(
                score.label, i, (), -test.mean_difference, (-test.ci_high, -test.ci_low),
                f"p = {p_text(score.adjusted)}", score.significant,
            )
        )  # fmt: skip
    title = f"Difference from {study.reference}"
    described = "; ".join(
        f"{one.label} {value_text(one.centre, study.metric, signed=True)}, {one.note}"
        for one in dots
    )
    frame = svg.Frame(
        f"{key}-differences", title, f"{described}.",
        f"final {study.metric} minus that of {study.reference}"
        + (", in points" if "accuracy" in study.metric else ""),
    )  # fmt: skip
    number = _points if "accuracy" in study.metric else svg.plain
    better = "right" if study.higher_is_better else "left"
    lead = (
        f"Mean over paired seeds with its 95 % interval; {better} of the line is better than "
        f"{study.reference}. Filled: significant after Holm's correction (p beside it)."
    )
    return [Chart("differences", title, lead, svg.rows(dots, frame, number=number, zero=True))]


def _points(value: float) -> str:
    return f"{100 * value:+.6g}".replace("-", MINUS) if value else "0"


def _seeds(outcome: Outcome, key: str) -> list[Chart]:
    study = outcome.study
    ranked = outcome.ranked
    finite = [s for s in ranked if all(map(math.isfinite, s.finals.values()))]
    if not finite:
        return []
    style = {score.label: i for i, score in enumerate(outcome.scores)}
    paired = len(finite) <= MOST_IN_ONE_CHART and any(len(s.finals) > 1 for s in finite)
    dots = [
        svg.Dots(
            score.label, style[score.label] if len(outcome.scores) <= MOST_IN_ONE_CHART else 0,
            [(f"seed {seed}", value) for seed, value in score.finals.items()], score.mean,
            None, value_text(score.mean, study.metric),
        )
        for score in finite
    ]  # fmt: skip
    title = f"Final {study.metric} of every seed"
    described = "; ".join(f"{one.label} {one.note} on average" for one in dots)
    frame = svg.Frame(f"{key}-seeds", title, f"{described}.", f"final {study.metric}")
    lead = "A dot is a run, the upright stroke their mean, best first." + (
        " Thin lines join runs of the same seed." if paired and len(finite) > 1 else ""
    )
    drawing = svg.rows(dots, frame, number=_number(study), paired=paired)
    return [Chart("seeds", title, lead, drawing)]


def _trouble(outcome: Outcome, key: str) -> list[Chart]:
    """Refused uploads and dead runs by round, where there are any."""
    study = outcome.study
    charts = []
    for name, title, ylabel, count in (
        ("dropped", "Uploads refused in each round", "uploads, all seeds", _dropped_by_round),
        ("diverged", "Runs that have diverged", "runs", _diverged_by_round),
    ):
        lines = []
        for i, (label, runs) in enumerate(study.members.items()):
            x, y = count(runs)
            if any(y):
                lines.append(svg.Line(label, i, x, y))
        if lines:
            totals = "; ".join(f"{line.label}: at most {max(line.y):g}" for line in lines)
            frame = svg.Frame(f"{key}-{name}", title, f"{totals}.", "communication round", ylabel)
            legend = tuple(Entry(svg.swatch(line.style), line.label) for line in lines)
            lead = (
                "An upload is refused when it is not finite; algorithms without any are left out."
            )
            if name == "diverged":
                lead = "Algorithms of which every run lived are left out."
            crowded = len(lines) > svg.MOST_DIRECT_LABELS
            drawing = svg.curves(lines, frame, whole=True)
            charts.append(Chart(name, title, lead, drawing, legend, crowded))
    return charts


def _dropped_by_round(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    totals: dict[int, float] = {}
    for run in runs:
        for round_, dropped in zip(run.log.rounds, run.log.dropped, strict=True):
            totals[round_] = totals.get(round_, 0.0) + dropped
    return [float(r) for r in sorted(totals)], [totals[r] for r in sorted(totals)]


def _diverged_by_round(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    ends = sorted(run.diverged for run in runs if run.diverged is not None)
    if not ends:
        return [], []
    x, y = [0.0], [0.0]
    for i, end in enumerate(ends):
        x += [float(end), float(end)]
        y += [float(i), float(i + 1)]
    last = max(run.asked or run.done for run in runs)
    return [*x, float(last)], [*y, float(len(ends))]


def _protocol(study: Study) -> tuple[tuple[str, str], ...]:
    spec = study.runs[0].spec
    tables = {**spec.get("preset", {}), **spec.get("protocol", {})}
    return tuple((key.replace("_", " "), _setting(value)) for key, value in tables.items())


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _run_line(run: Run) -> dict[str, str]:
    if run.diverged is not None:
        state = f"diverged in round {run.diverged:,}"
    elif run.complete:
        state = f"finished, {run.done:,} rounds"
    else:
        state = f"round {run.done:,} of {run.asked or '?'}"
    return {
        "place": run.place,
        "state": state,
        "engine": str(run.manifest.get("engine", NONE)),
        "seconds": f"{run.log.seconds:,.1f}",
    }


def _paper_note(outcome: Outcome) -> tuple[str, ...]:
    study = outcome.study
    if study.task in paper.COUNTERPARTS:
        return ()
    return (f"The paper has no numbers for {study.task}, so none stand beside these.",)


def _commands(material: Material) -> list[tuple[str, list[str]]]:
    """What repeats the runs, from what is on disk."""
    out: list[tuple[str, list[str]]] = []
    recorded = [
        " ".join(command) if isinstance(command, list) else str(command)
        for study in material.studies
        for run in study.runs
        if (command := run.manifest.get("command"))
    ]
    if recorded:
        out.append(("As recorded when the runs began", list(dict.fromkeys(recorded))))
    whole = []
    for file in material.plans:
        place, _, name = file.rpartition("/")
        whole.append(f"fedzmg {name.removesuffix('.toml')} {file} --out again/{place}")
    if whole:
        out.append(("The whole of it again", whole))
    runs = [run for study in material.studies for run in study.runs]
    if runs:
        lines = [f"fedzmg run {run.place}/spec.toml --out again/{run.place}" for run in runs]
        out.append(("Each run again, with every setting as it was", lines))
    out.append(("This page again", [f"fedzmg report {' '.join(material.names)}"]))
    return out


def _grid(extra: Extra, position: int) -> dict[str, Any]:
    data = extra.content
    metric = str(data.get("metric", "score"))
    facts = []
    if "rounds" in data and "last" in data:
        facts.append(f"score: mean {metric} of the last {data['last']} of {data['rounds']} rounds")
    if "selection" in data:
        half = {"tune": "the half of the test data set aside for choosing", "test": "all test data"}
        facts.append(f"chosen on {half.get(str(data['selection']), data['selection'])}")
    if data.get("complete") is False:
        facts.append("not finished yet")
    maps = [
        _grid_map(name, entry, metric, f"g{position}-{i}")
        for i, (name, entry) in enumerate(data.get("algorithms", {}).items())
    ]
    task = data.get("label") or data.get("task") or extra.place
    return {"name": str(task), "place": extra.place, "facts": "; ".join(facts), "maps": maps}


def _grid_map(name: str, entry: Mapping[str, Any], metric: str, key: str) -> GridMap:
    axes: Mapping[str, Sequence[float]] = entry["axes"]
    points = grid_points(entry)
    best = entry.get("best") or {}
    chosen = best.get("options", {})
    number = _bare_percent if "accuracy" in metric else _three
    told, warning = "every point diverged", ""
    if chosen:
        options = ", ".join(f"{k} = {_three(v)}" for k, v in chosen.items())
        score = best.get("score")
        told = options + ("" if score is None else f": {value_text(score, metric)}")
        if best.get("border", entry.get("border")):
            edges = ", ".join(best.get("border_axes", [])) or "an axis"
            warning = f"The best lies on the border of {edges}: a wider grid may do better."
    drawing: Markup | None = None
    rows: tuple[tuple[str, str], ...] = ()
    if 1 <= len(axes) <= 2:
        drawing = _heat(name, axes, points, chosen, key, number, metric)
    else:
        order = sorted(points, key=lambda p: -math.inf if p[1] is None else p[1], reverse=True)
        rows = tuple(
            (", ".join(f"{k} {_three(v)}" for k, v in options.items()), value_text(score, metric))
            for options, score in order[:MOST_LISTED]
        )
    return GridMap(name, told, warning, drawing, rows)


def grid_points(entry: Mapping[str, Any]) -> list[tuple[dict[str, float], float | None]]:
    """Options and score of every point, whichever way a grid wrote them."""
    axes: Mapping[str, Sequence[float]] = entry["axes"]
    listed = entry.get("points", entry.get("scores", []))
    if listed and isinstance(listed[0], Mapping):
        return [(dict(point["options"]), point["score"]) for point in listed]
    points: list[tuple[dict[str, float], float | None]] = []

    def walk(values: Any, options: dict[str, float]) -> None:
        depth = len(options)
        if depth == len(axes):
            points.append((options, values))
            return
        axis = list(axes)[depth]
        for at, inner in zip(axes[axis], values, strict=True):
            walk(inner, {**options, axis: at})

    walk(listed, {})
    return points


def grid_cells(
    entry: Mapping[str, Any],
) -> tuple[str, list[float], str, list[float], list[list[float | None]]]:
    """Name and values of the horizontal axis, then of the vertical one from above, and scores."""
    axes: Mapping[str, Sequence[float]] = entry["axes"]
    across, *rest = sorted(axes, key=lambda axis: (not axis.startswith("client"), axis))
    down = rest[0] if rest else ""
    columns = list(axes[across])
    lines = sorted(axes[down], reverse=True) if down else [0.0]
    known = {tuple(options.get(a) for a in (across, down)): s for options, s in grid_points(entry)}
    cells = [[known.get((x, y if down else None)) for x in columns] for y in lines]
    return across, columns, down, list(lines), cells


def _heat(
    name: str,
    axes: Mapping[str, Sequence[float]],
    points: Sequence[tuple[dict[str, float], float | None]],
    chosen: Mapping[str, float],
    key: str,
    number: svg.Number,
    metric: str,
) -> Markup:
    listed = [{"options": options, "score": score} for options, score in points]
    across, columns, down, lines, cells = grid_cells({"axes": axes, "points": listed})
    cells = [[s if s is not None and math.isfinite(s) else None for s in line] for line in cells]
    best = None
    if chosen:
        i = lines.index(chosen[down]) if down else 0
        best = i, columns.index(chosen[across])
    frame = svg.Frame(
        key, f"Grid of {name}", f"Scores ({metric}) of {len(points)} points.", across, down
    )
    shown = [_three(value) for value in lines] if down else [""]
    return svg.heat_map(
        frame, [_three(value) for value in columns], shown, cells, best=best, number=number
    )


def _three(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _bare_percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _heterogeneity(extra: Extra, position: int) -> dict[str, Any]:
    report = extra.content
    name = str(report.get("name") or extra.place)
    twin = _HETEROGENEITY_TWINS.get(name)
    sheet = sheets.heterogeneity(report, PAPER.get(twin) if twin else None)
    clients = report.get("clients", [])
    drawing = None
    if 1 < len(clients) <= MOST_SCATTERED:
        title, xlabel = "How far clients are from the whole", "clients, nearest first"
        points = [(str(c["client"]), float(c["volume"]), float(c["kl"])) for c in clients]
        if len({volume for _, volume, _ in points}) > 1:
            title += ", by how much they hold"
            xlabel = f"volume ({report.get('unit', 'examples')})"
        else:
            ordered = sorted(points, key=lambda point: point[2])
            points = [(name, float(i + 1), kl) for i, (name, _, kl) in enumerate(ordered)]
        frame = svg.Frame(f"h{position}", title, f"{len(points)} clients.", xlabel, "KL divergence")
        drawing = Chart("clients", title, "A dot is a client.", svg.scatter(points, frame))
    note = ""
    if twin and twin != name:
        note = f"The paper's column is about its own {twin}, not about {name}."
    return {"name": name, "sheet": sheet, "chart": drawing, "note": note}
