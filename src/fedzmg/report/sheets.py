"""Tables as data: the page, Markdown, LaTeX and CSV all show the same cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedzmg.report import paper
from fedzmg.report.outcome import (
    LEVEL,
    MIB,
    RULES,
    Outcome,
    Score,
    arrival_at,
    late_means,
    p_text,
    value_text,
)
from fedzmg.report.reading import Run, variant
from fedzmg.report.svg import MINUS, NONE

Value = float | int | str | bool | None
_RULE_NAMES = {"rolling_min": "all above", "stays_above": "stays above"}


_FACT_NAMES = {
    "dirty": "uncommitted changes",
    "data_sha256": "SHA-256 of the data",
    "task_sha256": "SHA-256 of the task",
}
_RATES = ("client.lr", "server.lr")


class Cell(NamedTuple):
    """What is shown, and the number behind it to sort by."""

    text: str
    value: float | None = None
    kind: str = ""
    """``best``, ``yes``, ``quiet`` or ``words``, which are long."""


class Sheet(NamedTuple):
    """A table with its words."""

    key: str
    title: str
    heads: tuple[str, ...]
    rows: list[list[Cell]]
    caption: str
    records: list[dict[str, Value]]
    """The same with full precision, one flat record per row or finer."""
    words: int = 1
    """So many columns at the start are words, not numbers."""


def goal_text(threshold: float, metric: str) -> str:
    """A threshold for people: 80 %, not 80.00 %."""
    return value_text(threshold, metric).replace(".00", "")


def scores(outcome: Outcome) -> Sheet:
    """Final value, speed, late stage, test and cost of every algorithm."""
    study = outcome.study
    metric, threshold = study.metric, study.threshold
    goal = [] if threshold is None else [
        f"rounds to {goal_text(threshold, metric)}" if i == 0 else _RULE_NAMES[rule]
        for i, rule in enumerate(RULES)
    ] + ["each run"]  # fmt: skip
    has_late = any(score.late is not None for score in outcome.scores)
    tested = any(score.test is not None for score in outcome.scores)
    troubled = any(s.diverged or s.unfinished or s.dropped for s in outcome.scores)
    heads = [
        "algorithm",
        f"final {metric}",
        *goal,
        *(["late stage"] if has_late else []),
        *(
            [f"{study.reference} minus it", "95 % interval", "p", "p (Holm)", "d_z"]
            if tested
            else []
        ),
        "MiB per run",
        f"{metric} per MiB",
        *(["diverged", "dropped", "unfinished"] if troubled else []),
    ]
    best = outcome.ranked[0].label if outcome.ranked else ""
    rows = []
    for score in outcome.scores:
        row = [Cell(score.label), _final(score, metric, score.label == best)]
        if threshold is not None:
            row += [_rounds(score.arrivals[rule]) for rule in RULES]
            row.append(_each(score))
        if has_late:
            row.append(Cell(value_text(score.late, metric), score.late))
        if tested:
            row += _test(score, metric)
        moved = score.traffic["total"] / MIB
        row.append(Cell(f"{moved:,.1f}", moved))
        row.append(Cell(_per_mib(score.per_mib, metric), score.per_mib))
        if troubled:
            counts = (score.diverged, score.dropped, score.unfinished)
            row += [Cell(str(n), n, "" if n else "quiet") for n in counts]
        rows.append(row)
    return Sheet(
        "scores",
        f"Scores on {study.name}",
        tuple(heads),
        rows,
        _score_caption(outcome, tested, has_late),
        [_score_record(score) for score in outcome.scores],
    )


def _final(score: Score, metric: str, best: bool) -> Cell:
    if score.mean is None:
        return Cell(NONE, None, "quiet")
    text = value_text(score.mean, metric)
    if score.sd is not None:
        text = f"{text.removesuffix(' %')} ± {value_text(score.sd, metric)}"
    return Cell(text, score.mean, "best" if best else "")


def _rounds(arrived: int | None) -> Cell:
    # Never comes after every number.
    return Cell("never", math.inf, "quiet") if arrived is None else Cell(f"{arrived:,}", arrived)


def _each(score: Score) -> Cell:
    """Mean and deviation over runs that arrive."""
    arrived = [rounds for rounds in score.arrivals_each if rounds is not None]
    if not arrived:
        return Cell("never", math.inf, "quiet")
    mean = statistics.fmean(arrived)
    text = f"{mean:,.0f}"
    if len(arrived) > 1:
        text += f" ± {statistics.stdev(arrived):,.0f}"
    if len(arrived) < len(score.arrivals_each):
        text += f" ({len(arrived)} of {len(score.arrivals_each)})"
    return Cell(text, mean)


def _test(score: Score, metric: str) -> list[Cell]:
    test = score.test
    if test is None:
        return [Cell(NONE, None, "quiet") for _ in range(5)]
    low, high = (value_text(end, metric, signed=True) for end in (test.ci_low, test.ci_high))
    if metric and low.endswith(" %"):
        low = low.removesuffix(" %")
    effect = f"{test.effect_size:+.2f}".replace("-", MINUS).replace("inf", "∞")
    return [
        Cell(value_text(test.mean_difference, metric, signed=True), test.mean_difference),
        Cell(f"{low} to {high}"),
        Cell(p_text(test.p), test.p),
        Cell(p_text(score.adjusted), score.adjusted, "yes" if score.significant else ""),
        Cell(effect, test.effect_size),
    ]


def _per_mib(value: float | None, metric: str) -> str:
    if value is None:
        return NONE
    return f"{100 * value:#.3g} %" if "accuracy" in metric else f"{value:#.3g}"


def _score_caption(outcome: Outcome, tested: bool, has_late: bool) -> str:
    study = outcome.study
    parts = ["Final: mean over the last tenth of the rounds, ± standard deviation over seeds"]
    if study.threshold is not None:
        parts.append(
            f"rounds, counted from 1 (an index is one less): until the mean of {study.window} "
            "evaluations of the averaged curve reaches the threshold; all above: until each of "
            "them does; stays above: until no later mean falls below; each run: mean ± standard "
            "deviation of the runs' own arrivals"
        )
    if has_late:
        parts.append("late stage: mean after the slowest algorithm arrived")
    if tested:
        parts.append(
            "p: two-sided paired t-test over seeds, Holm over the tests of this table, bold where "
            f"it is at most {LEVEL:g}; d_z: mean difference over its standard deviation"
        )
    parts.append("MiB: traffic of one run, all clients, both ways")
    return "; ".join(parts) + "."


def _score_record(score: Score) -> dict[str, Value]:
    test = score.test
    return {
        "algorithm": score.label,
        "final_mean": score.mean,
        "final_sd": score.sd,
        **{f"rounds_{rule}": score.arrivals[rule] for rule in RULES},
        "rounds_each": " ".join("never" if r is None else str(r) for r in score.arrivals_each),
        "late_stage_mean": score.late,
        "difference": None if test is None else test.mean_difference,
        "ci_low": None if test is None else test.ci_low,
        "ci_high": None if test is None else test.ci_high,
        "t": None if test is None else test.t,
        "p": None if test is None else test.p,
        "p_holm": score.adjusted,
        "d_z": None if test is None else test.effect_size,
        "pairs": None if test is None else test.n,
        "mib_per_run": score.traffic["total"] / MIB,
        "metric_per_mib": score.per_mib,
        "diverged": score.diverged,
        "dropped": score.dropped,
        "unfinished": score.unfinished,
    }


def finals(outcome: Outcome) -> Sheet:
    """Final value of every seed."""
    study = outcome.study
    seeds = sorted({seed for score in outcome.scores for seed in score.finals})
    rows, records = [], []
    for score in outcome.scores:
        values = [score.finals.get(seed) for seed in seeds]
        rows.append([Cell(score.label), *(Cell(value_text(v, study.metric), v) for v in values)])
        records += [
            _record(algorithm=score.label, seed=seed, final=score.finals[seed])
            for seed in seeds
            if seed in score.finals
        ]
    heads = ("algorithm", *(f"seed {seed}" for seed in seeds))
    caption = "Mean over the last tenth of the rounds; a run that diverged counts as the worst."
    return Sheet("finals", f"Final {study.metric} of every seed", heads, rows, caption, records)


def traffic(outcome: Outcome) -> Sheet:
    """What moved in one run."""
    heads = (
        "algorithm", "arrays down", "arrays up", "up, packed", "scalars", "kept per client",
        "total", "seconds",
    )  # fmt: skip
    rows, records = [], []
    for score in outcome.scores:
        found = score.traffic
        scalars = found["scalar_bytes_down"] + found["scalar_bytes_up"]
        sizes = (
            found["bytes_down"], found["bytes_up"], found["bytes_up_bound"], scalars,
            found["kept"], found["total"],
        )  # fmt: skip
        rows.append(
            [
                Cell(score.label),
                *(Cell(size_text(size), size) for size in sizes),
                Cell(f"{score.seconds:,.1f}", score.seconds),
            ]
        )
        record = _record(algorithm=score.label, seconds=score.seconds)
        names = ("down", "up", "up_packed", "scalars", "kept", "total")
        records.append(record | dict(zip(names, sizes, strict=True)))
    caption = (
        "Mean over runs, all rounds and clients; packed: if whole numbers used no more bits than "
        "they need; seconds: training time of a run's share of its pack."
    )
    return Sheet("traffic", "Traffic of one run", heads, rows, caption, records)


def thresholds(outcome: Outcome) -> Sheet | None:
    """Rounds to each of several thresholds and the late stage after it; None for a single one."""
    study = outcome.study
    if len(study.thresholds) < 2:
        return None
    late = {level: late_means(study, level) for level in study.thresholds}
    heads, rows, records = ["algorithm"], [], []
    for level in study.thresholds:
        goal = goal_text(level, study.metric)
        heads += [f"rounds to {goal}", *(_RULE_NAMES[rule] for rule in RULES[1:])]
        heads.append(f"late stage {goal}")
    for score in outcome.scores:
        row, record = [Cell(score.label)], _record(algorithm=score.label)
        for level in study.thresholds:
            for rule in RULES:
                index = arrival_at(study, score.label, level, rule)
                reached = None if index is None else index + 1
                row.append(_rounds(reached))
                record[f"rounds_{rule}_{level:g}"] = reached
            value = late[level].get(score.label)
            row.append(Cell(value_text(value, study.metric), value))
            record[f"late_stage_mean_{level:g}"] = value
        rows.append(row)
        records.append(record)
    caption = "Rules as above; late stage: mean after the slowest algorithm arrived, if all did."
    return Sheet("thresholds", "All thresholds", tuple(heads), rows, caption, records)


def _record(**values: Value) -> dict[str, Value]:
    return values


def size_text(count: float) -> str:
    """Bytes with a binary unit.

    >>> size_text(6760184), size_text(512)
    ('6.4 MiB', '512 B')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def settings(outcome: Outcome) -> Sheet:
    """Hyper-parameters that were actually used, one column each."""
    members = outcome.study.members
    used = {label: variant(runs[0]) for label, runs in members.items()}
    keys = sorted({key for options in used.values() for key in options}, key=_setting_order)
    rates = [key for key in keys if key in _RATES]
    rows = [
        [
            Cell(label),
            *(_setting(options.get(key)) for key in rates),
            Cell(_others(options, keys), None, "words"),
        ]
        for label, options in used.items()
    ]
    records: list[dict[str, Value]] = [
        {"algorithm": label, **{key: options.get(key) for key in keys}}
        for label, options in used.items()
    ]
    caption = "Every default is written out; what is not named is off."
    heads = ("algorithm", *rates, "others")
    return Sheet("settings", "Hyper-parameters used", heads, rows, caption, records)


def _others(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    named = [key for key in keys if key in options and key not in _RATES]
    return ", ".join(f"{key} {_setting(options[key]).text}" for key in named)


def _setting_order(key: str) -> tuple[int, bool, str]:
    table = key.partition(".")[0]
    place = {"client": 0, "server": 1}.get(table, 2)
    return place, not key.endswith(".lr"), key


def _setting(value: Any) -> Cell:
    if value is None:
        return Cell("")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int | float):
        return Cell(f"{value:g}", float(value))
    return Cell(str(value))


def beside_paper(outcome: Outcome) -> Sheet | None:
    """The numbers that the paper printed for this task, ours, and the difference."""
    study = outcome.study
    twin = paper.COUNTERPARTS.get(study.task)
    if twin is None or "accuracy" not in study.metric:
        return None
    dataset = twin.dataset
    shown = [score for score in outcome.scores if score.label in dataset.lines]
    if not shown:
        return None
    low, high = paper.THRESHOLDS
    # The paper's slowest is among its own three algorithms, so others must not move the start.
    narrowed = {label: study.members[label] for label in (s.label for s in shown)}
    same = study.__class__(**{**vars(study), "members": narrowed})
    late = late_means(same, high)
    rows, records = [], []
    for score in shown:
        printed = dataset.lines[score.label]
        reached = [arrival_at(study, score.label, level) for level in (low, high)]
        row = [Cell(score.label)]
        for ours, theirs in zip(reached, (printed.to_low, printed.to_high), strict=True):
            row += [_rounds(ours), Cell(f"{theirs:,}", theirs), _gap(ours, theirs)]
        value = late.get(score.label)
        gap = None if value is None else value - printed.late
        row += [
            Cell(value_text(value, "accuracy"), value),
            Cell(value_text(printed.late, "accuracy"), printed.late),
            Cell(value_text(gap, "accuracy", signed=True), gap),
        ]
        rows.append(row)
        test = dataset.tests.get(score.label)
        records.append(
            {
                "algorithm": score.label,
                "to_low": reached[0], "to_low_paper": printed.to_low,
                "to_high": reached[1], "to_high_paper": printed.to_high,
                "late": value, "late_paper": printed.late,
                "t": None if score.test is None else score.test.t,
                "t_paper": None if test is None else test.t,
                "p": None if score.test is None else score.test.p,
                "p_paper": None if test is None else test.p,
            }
        )  # fmt: skip
    if any(score.label in dataset.tests for score in shown):
        for row, score in zip(rows, shown, strict=True):
            test = dataset.tests.get(score.label)
            own = score.test if study.reference == "fedzmg" else None
            row += [
                Cell(NONE if own is None else f"{own.t:.2f}".replace("-", MINUS)),
                Cell(NONE if test is None else f"{test.t:.2f}"),
                Cell(p_text(None if own is None else own.p)),
                Cell(p_text(None if test is None else test.p)),
            ]
    heads = ["algorithm"]
    for level in (low, high):
        heads += [f"to {100 * level:g} %", "paper", "diff."]
    heads += ["late stage", "paper", "diff."]
    if len(rows[0]) > len(heads):
        heads += ["t", "paper", "p", "paper"]
    return Sheet(
        "paper",
        f"Beside the paper's {dataset.title}",
        tuple(heads),
        rows,
        " ".join(_paper_words(outcome, twin)),
        records,
    )


def _gap(ours: int | None, theirs: int) -> Cell:
    if ours is None:
        return Cell(NONE, None, "quiet")
    return Cell(f"{ours - theirs:+,}".replace("-", MINUS), ours - theirs)


def _paper_words(outcome: Outcome, twin: paper.Counterpart) -> list[str]:
    study = outcome.study
    words = [
        "Rounds are given as the paper gives them, as the index of the evaluation: one less than "
        "the training rounds above. Late stage: mean accuracy after the slowest of these "
        f"algorithms reached {100 * paper.THRESHOLDS[1]:g} %. t and p: FedZMG minus the algorithm, "
        "not corrected."
    ]
    if twin.stands_in:
        words.append(
            f"{study.task} only stands in for the paper's {twin.dataset.title}: the data differ, "
            "so the differences say little."
        )
    differing = [
        f"{study.protocol[key]} {key} instead of {value}"
        for key, value in paper.PROTOCOL.items()
        if key in study.protocol and study.protocol[key] != value
    ]
    seeds = max(len(runs) for runs in study.members.values())
    differing += [f"{seeds} seeds instead of {paper.SEEDS}"] if seeds != paper.SEEDS else []
    if differing:
        words.append("Other than in the paper: " + ", ".join(differing) + ".")
    return words


def heterogeneity(report: Mapping[str, Any], printed: Mapping[str, Any] | None) -> Sheet:
    """Mean and deviation of every measure over clients, beside the paper's."""
    summary = report.get("summary", {})
    theirs = {} if printed is None else printed["summary"]
    rows, records = [], []
    for name, spread in summary.items():
        row = [Cell(name.replace("_", " ")), Cell(_spread(spread["mean"], spread["sd"]))]
        record: dict[str, Value] = {"measure": name, "mean": spread["mean"], "sd": spread["sd"]}
        if printed is not None:
            other = theirs.get(name)
            row.append(Cell(NONE if other is None else _spread(*other)))
            gap = None if other is None else spread["mean"] - other[0]
            row.append(Cell(NONE if gap is None else f"{gap:+.3g}".replace("-", MINUS), gap))
            record |= {"paper_mean": None if other is None else other[0]}
        rows.append(row)
        records.append(record)
    heads = ("measure", "mean ± sd", *(("paper", "diff.") if printed is not None else ()))
    total, described = report.get("total", 0), len(report.get("clients", []))
    caption = (
        f"{described:,} of {total:,} clients; volume in {report.get('unit', 'examples')}; entropy "
        f"over the logarithm of {report.get('entropy', 'classes')}; KL from the "
        f"{report.get('reference', 'global')} distribution."
    )
    return Sheet("heterogeneity", "How much clients differ", heads, rows, caption, records)


def _spread(mean: float, sd: float | None) -> str:
    return f"{mean:,.4g}" if sd is None else f"{mean:,.4g} ± {sd:,.3g}"


def circumstances(runs: Sequence[Run]) -> Sheet:
    """Versions, machine, commit and data; one row for every fact, with all values it had."""
    facts = (
        "fedzmg", "commit", "dirty", "python", "torch", "numpy", "platform", "device",
        "device_name", "threads", "dtype", "precision", "engine", "clients", "examples",
        "data_sha256", "task_sha256",
    )  # fmt: skip
    rows, records = [], []
    for fact in facts:
        found = [run.manifest[fact] for run in runs if run.manifest.get(fact) is not None]
        if found:
            texts = list(dict.fromkeys(map(_fact, found)))
            rows.append(
                [Cell(_FACT_NAMES.get(fact, fact.replace("_", " "))), Cell(", ".join(texts))]
            )
            records.append(_record(fact=fact, value=", ".join(texts)))
    started = sorted(str(r.manifest["started"]) for r in runs if r.manifest.get("started"))
    if started:
        span = " to ".join(dict.fromkeys((started[0], started[-1])))
        rows.append([Cell("started"), Cell(span)])
        records.append(_record(fact="started", value=span))
    return Sheet(
        "circumstances", "Versions, machine and data", ("fact", "value"), rows, "", records, 2
    )


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
