"""Tables of scores: final values, rounds to thresholds, late stage and cost of every algorithm."""

from __future__ import annotations

import math

from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results.averaging import arrivals, late_means, mean_and_sd
from fedzmg.results.formatting import (
    MIB,
    NONE,
    digits_text,
    goal_text,
    is_share,
    spread_text,
    value_text,
)
from fedzmg.results.scores import RULES
from fedzmg.results.study_result import AlgorithmResult, StudyResult

_RULE_NAMES = {"rolling_min": "all above", "stays_above": "stays above"}


def scores(result: StudyResult) -> Table:
    """Make the table of final value, speed, late stage and cost of every algorithm."""
    study = result.study
    metric, threshold = study.metric, study.threshold
    has_late = any(score.late is not None for score in result.scores)
    has_failures = any(s.diverged or s.unfinished or s.dropped for s in result.scores)
    heads = ["algorithm", f"final {metric}"]
    if threshold is not None:
        heads += [f"rounds to {goal_text(threshold, metric)}", *_RULE_NAMES.values(), "each run"]
    heads += ["late stage"] * has_late + ["MiB per run", f"{metric} per MiB"]
    heads += ["diverged", "dropped", "unfinished"] * has_failures
    best = result.ranked[0] if result.ranked else None
    rows = []
    for score in result.scores:
        row = [Cell(score.label), _final(score, metric, best=score is best)]
        if threshold is not None:
            running = score.unfinished > 0
            row += [round_cell(score.arrivals[rule], running=running) for rule in RULES]
            row.append(_each_run(score))
        row += [Cell(value_text(score.late, metric), score.late)] * has_late
        moved = score.traffic["total"] / MIB
        row.append(Cell(f"{moved:,.1f}" if score.finals else f"{moved:,.1f} so far", moved))
        row.append(Cell(_per_mib(score.per_mib, metric), score.per_mib))
        counts = (score.diverged, score.dropped, score.unfinished)
        row += [Cell(str(n), n, "" if n else "quiet") for n in counts] * has_failures
        rows.append(row)
    return Table(
        "scores",
        f"Scores on {study.name}",
        tuple(heads),
        rows,
        _caption(result, has_late),
        [_record(score) for score in result.scores],
    )


def thresholds(result: StudyResult) -> Table | None:
    """Make the table of arrivals and late stages by threshold; None for fewer than two."""
    study = result.study
    if len(study.thresholds) < 2:
        return None
    rows = []
    records: list[Record] = []
    for level in study.thresholds:
        late, _ = late_means(study, level)
        for label, runs in study.members.items():
            found = {rule: arrivals(study, runs, level, rule).averaged for rule in RULES}
            running = any(not run.complete for run in runs)
            mean = late.get(label)
            rows.append(
                [
                    Cell(goal_text(level, study.metric), level),
                    Cell(label),
                    *(round_cell(one, running=running) for one in found.values()),
                    NOTHING if mean is None else Cell(value_text(mean, study.metric), mean),
                ]
            )
            reached = {f"rounds_{rule}": one for rule, one in found.items()}
            records.append(
                {"threshold": level, "algorithm": label, **reached, "late_stage_mean": mean}
            )
    heads = ("threshold", "algorithm", "rounds", *_RULE_NAMES.values(), "late stage")
    caption = "Rules as above; late stage: mean after the slowest algorithm arrived, if all did."
    title = f"All thresholds on {study.name}"
    return Table("thresholds", title, heads, rows, caption, records, 2)


def finals(result: StudyResult) -> Table:
    """Make the table of the final value of every seed."""
    study = result.study
    seeds = sorted({seed for score in result.scores for seed in score.finals})
    rows = []
    records: list[Record] = []
    for score in result.scores:
        values = [score.finals.get(seed) for seed in seeds]
        lost = {run.seed for run in study.members[score.label] if run.diverged is not None}
        rows.append(
            [
                Cell(score.label),
                *(
                    Cell("diverged") if seed in lost else Cell(value_text(v, study.metric), v)
                    for seed, v in zip(seeds, values, strict=True)
                ),
            ]
        )
        records += [
            {"algorithm": score.label, "seed": seed, "final": value}
            for seed, value in zip(seeds, values, strict=True)
            if value is not None
        ]
    heads = ("algorithm", *(f"seed {seed}" for seed in seeds))
    caption = "Mean over the last tenth of the rounds; diverged runs are left out."
    title = f"Final {study.metric} of every seed on {study.name}"
    return Table("finals", title, heads, rows, caption, records)


def round_cell(round_: int | None, *, running: bool = False) -> Cell:
    """Show the round of an arrival; "never" sorts after every number."""
    if round_ is None:
        return Cell("not yet" if running else "never", math.inf, "quiet")
    return Cell(f"{round_:,}", round_)


def _final(score: AlgorithmResult, metric: str, *, best: bool) -> Cell:
    if score.mean is None:
        return Cell("diverged") if score.diverged else NOTHING
    return Cell(spread_text(score.mean, score.sd, metric), score.mean, "best" if best else "")


def _each_run(score: AlgorithmResult) -> Cell:
    """Show mean and deviation over the runs that arrive."""
    arrived = [one for one in score.arrivals_each if one is not None]
    if not arrived:
        return round_cell(None, running=score.unfinished > 0)
    mean, sd = mean_and_sd(arrived)
    text = f"{mean:,.0f}" + ("" if sd is None else f" ± {sd:,.0f}")
    if len(arrived) < len(score.arrivals_each):
        text += f" ({len(arrived)} of {len(score.arrivals_each)})"
    return Cell(text, mean)


def _per_mib(value: float | None, metric: str) -> str:
    if value is None:
        return NONE
    return f"{digits_text(100 * value)} %" if is_share(metric) else digits_text(value)


def _caption(result: StudyResult, has_late: bool) -> str:
    study = result.study
    parts = ["Final: mean over the last tenth of the rounds, ± standard deviation over seeds"]
    if study.threshold is not None:
        parts.append(
            f"rounds to a threshold: until the mean of {study.window} evaluations of the averaged "
            "curve reaches it; all above: until each of them does; stays above: until no later "
            "mean falls below; each run: mean ± standard deviation over runs"
        )
    if has_late:
        parts.append("late stage: mean after the slowest algorithm arrived")
    parts.append("MiB: traffic of one run, all clients, both ways")
    return "; ".join(parts) + "."


def _record(score: AlgorithmResult) -> Record:
    return {
        "algorithm": score.label,
        "final_mean": score.mean,
        "final_sd": score.sd,
        **{f"rounds_{rule}": score.arrivals[rule] for rule in RULES},
        "rounds_each": " ".join("never" if r is None else str(r) for r in score.arrivals_each),
        "late_stage_mean": score.late,
        "mib_per_run": score.traffic["total"] / MIB,
        "metric_per_mib": score.per_mib,
        "diverged": score.diverged,
        "dropped": score.dropped,
        "unfinished": score.unfinished,
    }
