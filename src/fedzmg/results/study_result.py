"""What a study came to: the scores of every algorithm, and the tests between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedzmg.results.averaging import (
    RULES,
    Curve,
    arrival,
    drawn_curve,
    finals,
    late_means,
    scored,
)
from fedzmg.results.formatting import MIB, count_text, value_text
from fedzmg.results.grouping import Study
from fedzmg.results.scores import fell_from
from fedzmg.results.significance import FamilyTest, PairedTest, holm
from fedzmg.results.significance import family as test_family

LEVEL = 0.05


@dataclass(frozen=True)
class AlgorithmResult:
    """One algorithm's outcome."""

    label: str
    algorithm: str
    finals: Mapping[int, float]
    """Final metric of every finished seed; the worst value for a run that diverged."""
    mean: float | None
    sd: float | None
    arrivals: Mapping[str, int | None]
    """Index of the round at which the mean curve arrived at the threshold, by rule."""
    arrivals_each: tuple[int | None, ...]
    """The same for every run alone, by the first rule."""
    late: float | None
    evidence: FamilyTest | None
    """Reference minus this one, over the seeds that both finished."""
    traffic: Mapping[str, float]
    """Means over the runs that went furthest, in bytes."""
    seconds: float
    dropped: int
    diverged: int
    unfinished: int
    curve: Curve | None

    @property
    def test(self) -> PairedTest | None:
        """The paired t-test of the reference minus this one."""
        return None if self.evidence is None else self.evidence.test

    @property
    def adjusted(self) -> float | None:
        """The test's p-value after Holm's correction over the study."""
        return None if self.evidence is None else self.evidence.p_holm

    @property
    def significant(self) -> bool:
        """Whether the test holds after the correction."""
        return self.evidence is not None and holds(self.evidence)

    @property
    def shown_label(self) -> str:
        """Its label beside a curve, with what has to be known about that."""
        if self.curve is not None and self.curve.broke_off:
            return f"{self.label} (diverged)"
        if self.diverged:
            return f"{self.label} ({self.diverged} diverged)"
        if self.unfinished and not self.finals:
            return f"{self.label} (unfinished)"
        return self.label

    @property
    def per_mib(self) -> float | None:
        """Final metric over the MiB that moved in one run."""
        moved = self.traffic["total"]
        return None if self.mean is None or not moved else self.mean * MIB / moved


@dataclass(frozen=True)
class StudyResult:
    """All scores of a study, reference first."""

    study: Study
    scores: tuple[AlgorithmResult, ...]
    tests: tuple[FamilyTest, ...]
    """The whole family, over which Holm's correction goes."""
    notes: tuple[str, ...]

    @property
    def ranked(self) -> list[AlgorithmResult]:
        """Scores with a final value, best first; of equals the one named first."""
        sign = -1.0 if self.study.higher_is_better else 1.0
        finished = [(sign * s.mean, i, s) for i, s in enumerate(self.scores) if s.mean is not None]
        return [score for _, _, score in sorted(finished, key=lambda entry: entry[:2])]


def holds(test: FamilyTest) -> bool:
    """Whether a difference is significant after the correction."""
    return test.p_holm <= LEVEL


def study_result(study: Study) -> StudyResult:
    """AlgorithmResult every algorithm of a study."""
    ends = {label: finals(study, runs) for label, runs in study.members.items()}
    tests = tested(study, ends)
    level = study.threshold
    late, why_not = ({}, "") if level is None else late_means(study, level)
    found = tuple(_score(study, label, ends[label], tests, late) for label in study.members)
    notes = [
        *study.notes,
        *([why_not] if why_not else []),
        *_fallen_notes(study, ends),
        *_pairing_notes(study, ends),
    ]
    return StudyResult(study, found, tuple(tests), tuple(notes))


def tested(study: Study, ends: Mapping[str, Mapping[int, float]]) -> list[FamilyTest]:
    """Test all pairs of a study as one family, each over the seeds that both have finished."""
    found: list[FamilyTest] = []
    for first, second in study.pairs:
        seeds = [seed for seed in ends[first] if seed in ends[second]]
        values = {label: [ends[label][seed] for seed in seeds] for label in (first, second)}
        found += test_family(values, [(first, second)])
    adjusted = holm([one.test.p for one in found])
    return [replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]


def _score(
    study: Study,
    label: str,
    ends: Mapping[int, float],
    tests: list[FamilyTest],
    late: Mapping[str, float],
) -> AlgorithmResult:
    runs, values = study.members[label], list(ends.values())
    # What is under way, or was stopped when it diverged, has not moved all its bytes.
    whole = [run for run in runs if run.done == max(other.done for other in runs)]
    level = study.threshold
    held = (study.reference, label)
    return AlgorithmResult(
        label=label,
        algorithm=runs[0].algorithm,
        finals=ends,
        mean=statistics.fmean(values) if values else None,
        sd=statistics.stdev(values)
        if len(values) > 1 and all(map(math.isfinite, values))
        else None,
        arrivals={
            rule: None if level is None else arrival(study, runs, level, rule) for rule in RULES
        },
        arrivals_each=tuple(
            None if level is None else arrival(study, [run], level) for run in runs
        ),
        late=late.get(label),
        evidence=next((one for one in tests if (one.first, one.second) == held), None),
        traffic={
            name: statistics.fmean(run.log.traffic[name] for run in whole)
            for name in runs[0].log.traffic
        },
        seconds=statistics.fmean(run.log.seconds for run in whole),
        dropped=sum(sum(run.log.dropped) for run in runs),
        diverged=sum(run.diverged is not None for run in runs),
        unfinished=sum(not run.complete for run in runs),
        curve=drawn_curve(runs),
    )


def _fallen_notes(study: Study, ends: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Runs that had learnt and lost it again: they hide in a mean and in its deviation."""
    if not study.higher_is_better:
        return []
    notes = []
    for label, runs in study.members.items():
        for run in runs:
            if run.diverged is not None or run.seed not in ends[label]:
                continue
            final = ends[label][run.seed]
            height = fell_from(scored(study, run)[1], final, window=study.window)
            if height is not None:
                had, has = (value_text(value, study.metric) for value in (height, final))
                notes.append(f"{label}, seed {run.seed}, fell back from {had} to {has}.")
    return notes


def _pairing_notes(study: Study, ends: Mapping[str, Mapping[int, float]]) -> list[str]:
    notes = []
    reference = set(ends[study.reference])
    for label, runs in study.members.items():
        unfinished = [run for run in runs if not run.complete]
        if unfinished:
            states = ", ".join(
                f"seed {run.seed} at round {run.done} of {run.asked or '?'}" for run in unfinished
            )
            notes.append(f"{label} is not finished ({states}): no final value for it.")
        if ends[label] and reference and set(ends[label]) != reference:
            shared = len(reference & set(ends[label]))
            notes.append(f"{label} shares {shared} finished seeds with {study.reference}.")
    if study.awaited:
        counts = [f"{label} ({count_text(n, 'run')})" for label, n in study.awaited.items()]
        notes.append(f"Still to come: {', '.join(counts)}.")
    if max(map(len, ends.values())) < 2:
        single = not study.awaited and all(len(runs) == 1 for runs in study.members.values())
        seeds = "One seed each" if single else "No algorithm has two finished seeds"
        notes.append(f"{seeds}: there is no spread and no test.")
    return notes
