"""What a study came to: scores, tests, curves, and a summary in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedzmg.experiment import scores
from fedzmg.experiment.significance import PairedTest, holm, paired_t
from fedzmg.report.reading import Run, Study
from fedzmg.report.svg import MINUS, NONE

LEVEL = 0.05
RULES: tuple[scores.ThresholdRule, ...] = get_args(scores.ThresholdRule)
MIB = 2**20


class Curve(NamedTuple):
    """The runs of one algorithm, averaged where all of them were evaluated."""

    rounds: NDArray[np.int64]
    mean: NDArray[np.float64]
    spread: NDArray[np.float64] | None
    """Sample standard deviation; None for a single run."""
    mib: NDArray[np.float64]
    """Traffic until each evaluation."""
    averaged: int
    broke_off: bool
    """Whether every run diverged, so that the curve ends early."""


@dataclass(frozen=True)
class Score:
    """One algorithm's outcome."""

    label: str
    algorithm: str
    finals: Mapping[int, float]
    """Final metric of every finished seed; the worst value for a run that diverged."""
    mean: float | None
    sd: float | None
    arrivals: Mapping[str, int | None]
    """Training rounds until the mean curve arrived at the threshold, by rule."""
    arrivals_each: tuple[int | None, ...]
    """The same for every run alone, by the first rule."""
    late: float | None
    test: PairedTest | None
    """Reference minus this one, over the seeds that both finished."""
    adjusted: float | None
    """The test's p-value after Holm's correction over the study."""
    traffic: Mapping[str, float]
    """Means over finished runs, in bytes; over all of them while none is finished."""
    per_mib: float | None
    seconds: float
    dropped: int
    diverged: int
    unfinished: int
    curve: Curve | None

    @property
    def significant(self) -> bool:
        """Whether the test holds after the correction."""
        return self.adjusted is not None and self.adjusted <= LEVEL


@dataclass(frozen=True)
class Outcome:
    """All scores of a study, reference first."""

    study: Study
    scores: tuple[Score, ...]
    notes: tuple[str, ...]

    @property
    def ranked(self) -> list[Score]:
        """Scores with a final value, best first; of equals the one named first."""
        sign = -1.0 if self.study.higher_is_better else 1.0
        finished = [(sign * s.mean, i, s) for i, s in enumerate(self.scores) if s.mean is not None]
        return [score for _, _, score in sorted(finished, key=lambda entry: entry[:2])]


def judge(study: Study) -> Outcome:
    """Score every algorithm of a study."""
    finals = {label: _finals(study, runs) for label, runs in study.members.items()}
    arrivals = {label: _arrivals(study, runs) for label, runs in study.members.items()}
    tests = {label: _test(finals[study.reference], finals[label]) for label in study.members}
    tests[study.reference] = None
    late, why_not = _late(study, {label: found[RULES[0]] for label, found in arrivals.items()})
    tested = [label for label, test in tests.items() if test is not None]
    family = dict(zip(tested, holm([test.p for test in tests.values() if test]), strict=True))
    found = []
    for label, runs in study.members.items():
        values = list(finals[label].values())
        ended = all(map(math.isfinite, values))
        mean = statistics.fmean(values) if values else None
        # What is under way has not moved all its bytes yet.
        whole = [run for run in runs if run.complete] or runs
        traffic = {
            name: statistics.fmean(run.log.traffic[name] for run in whole)
            for name in runs[0].log.traffic
        }
        moved = traffic["total"]
        found.append(
            Score(
                label=label,
                algorithm=runs[0].algorithm,
                finals=finals[label],
                mean=mean,
                sd=statistics.stdev(values) if len(values) > 1 and ended else None,
                arrivals=arrivals[label],
                arrivals_each=tuple(_arrival(study, [run], RULES[0]) for run in runs),
                late=late.get(label),
                test=tests[label],
                adjusted=family.get(label),
                traffic=traffic,
                per_mib=None if mean is None or not moved else mean * MIB / moved,
                seconds=statistics.fmean(run.log.seconds for run in whole),
                dropped=sum(sum(run.log.dropped) for run in runs),
                diverged=sum(run.diverged is not None for run in runs),
                unfinished=sum(not run.complete for run in runs),
                curve=_curve(runs),
            )
        )
    notes = [*study.notes, *([why_not] if why_not else []), *_pairing_notes(study, finals)]
    return Outcome(study, tuple(found), tuple(notes))


def arrival_at(
    study: Study, label: str, threshold: float, rule: scores.ThresholdRule = RULES[0]
) -> int | None:
    """Index of the evaluation at which an algorithm's mean curve reaches any threshold."""
    arrived = _arrival(study, study.members[label], rule, threshold)
    return None if arrived is None else arrived - 1


def late_means(study: Study, threshold: float) -> dict[str, float]:
    """Mean after the slowest algorithm reached a threshold; empty if one never does."""
    reached = {label: arrival_at(study, label, threshold) for label in study.members}
    return _late(study, {n: None if r is None else r + 1 for n, r in reached.items()})[0]


def scored(study: Study, run: Run) -> tuple[list[int], list[float]]:
    """Evaluated rounds and metrics that count for the scores of a study."""
    every = int(run.spec.get("protocol", {}).get("eval_every", 1))
    pairs = [
        (round_, metric)
        for round_, metric in zip(run.log.evaluated, run.log.metrics, strict=True)
        if not study.scheduled or (round_ - 1) % every == 0
    ]
    return [round_ for round_, _ in pairs], [metric for _, metric in pairs]


def _finals(study: Study, runs: Sequence[Run]) -> dict[int, float]:
    worst = 0.0 if study.higher_is_better else math.inf
    finals = {}
    for run in runs:
        if run.diverged is not None:
            finals[run.seed] = worst
        elif run.complete:
            rounds, metrics = scored(study, run)
            indices = [round_ - 1 for round_ in rounds]
            finals[run.seed] = scores.final_score(indices, metrics, total=run.done)
    return finals


def _arrivals(study: Study, runs: Sequence[Run]) -> dict[str, int | None]:
    return {rule: _arrival(study, runs, rule) for rule in RULES}


def _arrival(
    study: Study,
    runs: Sequence[Run],
    rule: scores.ThresholdRule,
    threshold: float | None = None,
) -> int | None:
    threshold = study.threshold if threshold is None else threshold
    shared, table = _table([scored(study, run) for run in runs])
    if threshold is None or not shared:
        return None
    arrived = scores.rounds_to_threshold(
        [round_ - 1 for round_ in shared],
        scores.mean_curve(table),
        threshold,
        window=study.window,
        rule=rule,
        higher_is_better=study.higher_is_better,
    )
    return None if arrived is None else arrived + 1


def _table(
    curves: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[list[int], NDArray[np.float64]]:
    """Rounds at which all runs were evaluated, and the metrics there, one row per run."""
    logs = [dict(zip(rounds, metrics, strict=True)) for rounds, metrics in curves]
    shared = sorted(set(logs[0]).intersection(*logs[1:]))
    return shared, np.array([[log[round_] for round_ in shared] for log in logs], dtype=float)


def _test(reference: Mapping[int, float], other: Mapping[int, float]) -> PairedTest | None:
    seeds = [seed for seed in reference if seed in other]
    pairs = [reference[seed] for seed in seeds], [other[seed] for seed in seeds]
    if len(seeds) < 2 or not all(math.isfinite(value) for side in pairs for value in side):
        return None
    return paired_t(*pairs)


def _late(study: Study, arrivals: Mapping[str, int | None]) -> tuple[dict[str, float], str]:
    """Late-stage means, or why there are none."""
    never = [label for label, arrival in arrivals.items() if arrival is None]
    if never:
        missing = ", ".join(never[:3]) + (f" and {len(never) - 3} more" if len(never) > 3 else "")
        whether = "never reaches" if len(never) == 1 else "never reach"
        return {}, f"No late-stage mean: {missing} {whether} the threshold."
    every = [set(scored(study, run)[0]) for run in study.runs]
    rounds = sorted(every[0].intersection(*every[1:]))
    if not rounds:
        return {}, "No late-stage mean: the algorithms were evaluated after different rounds."
    curves = {}
    for label, runs in study.members.items():
        shared, table = _table([scored(study, run) for run in runs])
        columns = [shared.index(round_) for round_ in rounds]
        curves[label] = scores.mean_curve(table[:, columns])
    found = scores.late_stage_mean(rounds, curves, arrivals)
    if found is None:
        return {}, "No late-stage mean: no evaluation follows the slowest arrival."
    return {label: value for label, value in found.items() if math.isfinite(value)}, ""


def _curve(runs: Sequence[Run]) -> Curve | None:
    """What is drawn: finished runs that lived, else what there is of the others."""
    lived = [run for run in runs if run.diverged is None]
    finished = [run for run in lived if run.complete]
    chosen = finished or lived or list(runs)
    end = min((run.diverged for run in chosen if run.diverged is not None), default=None)
    shared, table = _table([(run.log.evaluated, run.log.metrics) for run in chosen])
    kept = [i for i, round_ in enumerate(shared) if end is None or round_ < end]
    if not kept:
        return None
    table = table[:, kept]
    moved = [dict(zip(run.log.evaluated, run.log.moved, strict=True)) for run in chosen]
    rounds = [shared[i] for i in kept]
    return Curve(
        rounds=np.array(rounds),
        mean=table.mean(axis=0),
        spread=table.std(axis=0, ddof=1) if len(table) > 1 else None,
        mib=np.array([statistics.fmean(log[r] for log in moved) / MIB for r in rounds]),
        averaged=len(chosen),
        broke_off=not lived,
    )


def _pairing_notes(study: Study, finals: Mapping[str, Mapping[int, float]]) -> list[str]:
    notes = []
    reference = set(finals[study.reference])
    for label, runs in study.members.items():
        unfinished = [run for run in runs if not run.complete]
        if unfinished:
            states = ", ".join(
                f"seed {run.seed} at round {run.done} of {run.asked or '?'}" for run in unfinished
            )
            notes.append(f"{label} is not finished ({states}): no final value for it.")
        if finals[label] and reference and set(finals[label]) != reference:
            shared = len(reference & set(finals[label]))
            notes.append(f"{label} shares {shared} finished seeds with {study.reference}.")
    if max(map(len, finals.values())) < 2:
        notes.append("One seed each: there is no spread and no test.")
    return notes


def value_text(value: float | None, metric: str, *, signed: bool = False) -> str:
    """A metric for people: accuracies in percent.

    >>> value_text(0.8674, "accuracy"), value_text(0.0056, "accuracy", signed=True)
    ('86.74 %', '+0.56 %')
    """
    if value is None or math.isnan(value):
        return NONE
    if "accuracy" in metric:
        text = f"{100 * value:{'+' if signed else ''}.2f} %"
    else:
        text = f"{value:{'+' if signed else ''}.4g}"
    return text.replace("-", MINUS)


def p_text(p: float | None) -> str:
    """A p-value for people.

    >>> p_text(0.0505), p_text(3.2e-05)
    ('0.0505', '3.2e-05')
    """
    if p is None:
        return NONE
    return f"{p:.3g}" if p >= 0.001 else ("0" if p == 0 else f"{p:.1e}")


def points_text(difference: float, metric: str) -> str:
    """The size of a difference; between percentages it is counted in points."""
    if "accuracy" in metric:
        return f"{100 * abs(difference):.2f} points"
    return f"{abs(difference):.4g}"


def summary(outcome: Outcome) -> list[str]:
    """Who is ahead, by how much, and whether that means anything: a few sentences."""
    study, ranked = outcome.study, outcome.ranked
    if not ranked:
        return [f"No run on {study.name} is finished yet."]
    best = ranked[0]
    seeds = len(best.finals)
    over = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    value = value_text(best.mean, study.metric)
    if len(ranked) == 1:
        sentences = [f"{best.label} ends at {value} final {study.metric} on {study.name} ({over})."]
    else:
        sentences = [_lead(study, best, ranked[1], value, over), *_tested(outcome, best, ranked)]
    return [*sentences, *_speed(outcome), *_trouble(outcome)]


def _lead(study: Study, best: Score, second: Score, value: str, over: str) -> str:
    gap = points_text((best.mean or 0.0) - (second.mean or 0.0), study.metric)
    what = f"final {study.metric} on {study.name}"
    if best.mean == second.mean:
        return f"{best.label} and {second.label} share the best {what}, {value} ({over})."
    return f"{best.label} has the best {what}, {value} ({over}), {gap} ahead of {second.label}."


def _tested(outcome: Outcome, best: Score, ranked: Sequence[Score]) -> list[str]:
    study = outcome.study
    tested = [score for score in outcome.scores if score.test is not None]
    if not tested:
        return ["There are too few seeds for a test."]
    count = len(tested)
    corrected = f", Holm over {count} tests" if count > 1 else ""
    if best.label != study.reference:
        test = best.test
        if test is None:
            return [f"Its lead over the reference {study.reference} cannot be tested."]
        verdict = "is significant" if best.significant else "is not significant"
        gap = points_text(test.mean_difference, study.metric)
        lead = f"Its lead of {gap} over the reference {study.reference}"
        if ranked[1].label == study.reference:
            lead = "That lead"
        return [
            f"{lead} {verdict} at the "
            f"{LEVEL:g} level (paired t-test, {test.n} seeds, p = {p_text(best.adjusted)}"
            f"{corrected})."
        ]
    won = [score.label for score in tested if score.significant]
    if count == 1:
        verdict = "significant" if won else "not significant"
        p = p_text(tested[0].adjusted)
        return [f"The difference is {verdict} at the {LEVEL:g} level (paired t-test, p = {p})."]
    if len(won) == count:
        return [
            f"It is significantly ahead of all {count} others (paired t-tests{corrected}, level "
            f"{LEVEL:g})."
        ]
    second = ranked[1]
    p = f"p = {p_text(second.adjusted)}"
    if not won:
        return [
            f"None of its leads is significant at the {LEVEL:g} level (paired t-tests{corrected}; "
            f"against {second.label} {p})."
        ]
    return [
        f"Its lead is significant against {len(won)} of {count} others (paired t-tests{corrected}, "
        f"level {LEVEL:g}; against {second.label} {p})."
    ]


def _speed(outcome: Outcome) -> list[str]:
    study = outcome.study
    if study.threshold is None:
        return []
    goal = value_text(study.threshold, study.metric).replace(".00", "")
    reached = [(s.arrivals[RULES[0]], s.label) for s in outcome.scores]
    arrived = [(rounds, label) for rounds, label in reached if rounds is not None]
    if not arrived:
        return [f"None reaches {goal}." if len(reached) > 1 else f"It does not reach {goal}."]
    first = min(rounds for rounds, _ in arrived)
    firsts = [label for rounds, label in arrived if rounds == first]
    if len(reached) == 1:
        return [f"It reaches {goal} after {first} rounds."]
    who = " and ".join([", ".join(firsts[:-1]), firsts[-1]] if len(firsts) > 1 else firsts)
    verb = "are" if len(firsts) > 1 else "is"
    return [f"{who} {verb} first to reach {goal}, after {first} rounds."]


def _trouble(outcome: Outcome) -> list[str]:
    diverged = sum(score.diverged for score in outcome.scores)
    unfinished = sum(score.unfinished for score in outcome.scores)
    total = len(outcome.study.runs)
    sentences = []
    if diverged:
        sentences.append(f"{diverged} of {total} runs diverged and count as the worst value.")
    if unfinished:
        sentences.append(f"{unfinished} of {total} runs are not finished.")
    return sentences
