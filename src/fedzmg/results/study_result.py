"""The result of a study: scores and tests of runs, from which all tables and files are made."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fedzmg.errors import InputError, listed
from fedzmg.plain_text import plain, printable
from fedzmg.results import formatting as fmt
from fedzmg.results import scores
from fedzmg.results.reading import Study, directories, group_study
from fedzmg.results.runs import Run
from fedzmg.results.scores import FINAL_RULES, RULES, Curve, ThresholdRule, arrivals
from fedzmg.results.significance import LEVEL, FamilyTest, PairedTest, family

if TYPE_CHECKING:
    from fedzmg.simulation import History

FORMAT = 1


@dataclass(frozen=True)
class AlgorithmResult:
    """Result of one algorithm."""

    label: str
    algorithm: str
    finals: Mapping[int, float]  # final metric of every seed that finished and did not diverge
    mean: float | None
    sd: float | None
    arrivals: Mapping[str, int | None]  # round when the mean curve reached the main threshold
    arrivals_each: tuple[int | None, ...]  # round when each run reached it, by the first rule
    late: float | None  # mean after the slowest algorithm reached the main threshold
    evidence: FamilyTest | None  # test of the reference minus this one, over the seeds of both
    traffic: Mapping[str, float]  # means over the longest runs, in bytes
    seconds: float
    dropped: int
    diverged: int
    unfinished: int
    curve: Curve | None
    runs: int = 0

    @property
    def test(self) -> PairedTest | None:
        """Paired t-test of the reference minus this one."""
        return None if self.evidence is None else self.evidence.test

    @property
    def adjusted(self) -> float | None:
        """The test's p-value after Holm's correction over the study."""
        return None if self.evidence is None else self.evidence.p_holm

    @property
    def significant(self) -> bool:
        return self.evidence is not None and self.evidence.significant

    @property
    def shown_label(self) -> str:
        """Label beside a curve, with a remark on diverged and unfinished runs."""
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
        return None if self.mean is None or not moved else self.mean * fmt.MIB / moved


@dataclass(frozen=True)
class StudyResult:
    """Results of all algorithms of a study, reference first; ``print`` shows a table."""

    study: Study
    scores: tuple[AlgorithmResult, ...]
    tests: tuple[FamilyTest, ...]
    """The whole family, over which Holm's correction goes."""
    notes: tuple[str, ...]
    histories: "Mapping[str, Sequence[History]]" = field(default_factory=dict)
    """Histories by label, for runs of this process; empty for runs read from disk."""

    @classmethod
    def from_histories(
        cls, histories: "Mapping[str, Sequence[History]]", plan: Mapping[str, Any] | None = None
    ) -> "StudyResult":
        """Compute the result of histories by label, reference first, as in a ``study.toml``."""
        seeds = {label: [h.trial.seed for h in runs] for label, runs in histories.items()}
        if not seeds or not all(seeds.values()):
            raise InputError("histories: give at least one algorithm with at least one history")
        first, *others = seeds
        for label in others:
            if seeds[label] != seeds[first]:
                both = f"{label} has the seeds {seeds[label]} and {first} {seeds[first]}"
                raise InputError(f"histories: {both}; runs are paired: give the same in order")
        runs = [Run.of_history(h, label) for label, each in histories.items() for h in each]
        order: dict[str, Any] = {"algorithms": list(histories)}
        return study_result(group_study(runs, plan or order, []), histories)

    @property
    def ranked(self) -> list[AlgorithmResult]:
        """Algorithms with a final value, best first; of equals the one named first."""
        sign = -1.0 if self.study.higher_is_better else 1.0
        finished = [score for score in self.scores if score.mean is not None]
        return sorted(finished, key=lambda score: sign * (score.mean or 0.0))

    @property
    def curves(self) -> dict[str, dict[str, Any]]:
        """Rounds and metrics of all runs by label; a diverged run's metrics end in None."""
        return {k: scores.scored_table(runs) for k, runs in self.study.members.items()}

    def __repr__(self) -> str:
        means = {s.label: "diverged" if s.mean is None else f"{s.mean:.4g}" for s in self.scores}
        finals = ", ".join(f"{label} {mean}" for label, mean in means.items())
        return plain(f"<StudyResult on {self.study.task!r}, {self._over()}: {finals}>")

    def __str__(self) -> str:
        """Show a short table, reference first; :meth:`as_dict` has all numbers."""
        study, rows = self.study, self.scores
        goal = "threshold" if study.threshold is None else f"{study.threshold:g}"
        means, reached = [row.mean for row in rows], [row.arrivals[RULES[0]] for row in rows]
        columns = {
            "algorithm": [row.label for row in rows],
            f"final {study.metric}": ["diverged" if m is None else f"{m:.4f}" for m in means],
            "sd": ["" if row.sd is None else f"{row.sd:.4f}" for row in rows],
            f"rounds to {goal}": ["never" if one is None else str(one) for one in reached],
            "diff.": [f"{row.test.mean_difference:+.4f}" if row.test else "" for row in rows],
            "p": [f"{row.test.p:.3g}" if row.test else "" for row in rows],
            "diverged": [f"{row.diverged} of {row.runs}" if row.diverged else "" for row in rows],
        }
        personal = [self._personal(row.label) for row in rows]
        if any(personal):
            part = next(run.clients[-1].part for run in study.runs if run.clients)
            means_of = (f"{statistics.fmean(p):.4f}" if p else "" for p in personal)
            columns[f"own models ({part})"] = [*means_of]
        words = ["final: mean over the last tenth of the rounds"]
        if any(row.test for row in rows):
            words.append(f"diff. and p: paired t-test of {study.reference} minus this one")
        if any(row.diverged for row in rows):
            words.append("diverged runs are left out of means and tests")
        text = [f"{study.name}, {self._over()}", "", fmt.aligned(columns), "", *words]
        return printable("\n".join(text))

    def _personal(self, label: str) -> list[float]:
        last = [run.clients[-1].personal for run in self.study.members[label] if run.clients]
        return [float(own[own == own].mean()) for own in last if own is not None]

    def _over(self) -> str:
        seeds = len(self.study.seeds)
        paired = "1 seed" if seeds == 1 else f"{seeds} paired seeds"
        return f"{paired}, {fmt.count_text(self.study.protocol.get('rounds', 0), 'round')}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything that ``study.json`` holds and ``--json`` prints."""
        study = self.study
        protocol, plan = study.protocol, study.plan
        return {
            "format": FORMAT, "task": study.task, "label": str(plan.get("label") or ""),
            "metric": study.metric, "higher_is_better": study.higher_is_better,
            "rates": plan.get("rates"), "preset": study.runs[0].spec.get("preset", {}),
            "seeds": study.seeds, "rounds": protocol.get("rounds"),
            "eval_every": protocol.get("eval_every"),
            **({"participation": dict(study.participation)} if study.participation else {}),
            "window": study.window, "precision": plan.get("precision"),
            "reference": study.reference,
            "complete": not study.awaited and not any(score.unfinished for score in self.scores),
            "algorithms": {score.label: self._algorithm(score) for score in self.scores},
            "thresholds": [
                {"threshold": level, "rules": {rule: self._reached(level, rule) for rule in RULES}}
                for level in study.thresholds
            ],
            "tests": {
                "score": "final, full", "family": "pairs" if study.every_pair else "reference",
                "pairs": [asdict(test) for test in self.tests],
            },
            "curves": self.curves, "notes": list(self.notes),
        }  # fmt: skip

    def _algorithm(self, score: AlgorithmResult) -> dict[str, Any]:
        from fedzmg.algorithms import ALGORITHMS

        runs, name = self.study.members[score.label], score.algorithm
        longest = max(runs, key=lambda run: run.done)
        ends = {rule: scores.finals(runs, rule) for rule in FINAL_RULES}
        spreads = {rule: scores.mean_and_sd(own.values()) for rule, own in ends.items()}
        skipped = ("dtype", "precision")
        return {
            "algorithm": name,
            "directory": directories(self.study.plan).get(score.label),
            "options": {k: v for k, v in longest.variant.items() if k not in skipped},
            "final": {
                rule: {"runs": [own.get(run.seed) for run in runs],
                       "mean": spreads[rule][0], "sd": spreads[rule][1]}
                for rule, own in ends.items()
            },
            "diverged": [run.diverged for run in runs],
            # Last round of a diverged run that was trained no further.
            "stopped": [
                run.done if run.diverged is not None and run.done < (run.asked or 0) else None
                for run in runs
            ],
            "unfinished": score.unfinished, "dropped": score.dropped, "steps": longest.steps,
            "traffic": dict(score.traffic), "metric_per_mib": score.per_mib,
            "seconds": sum(run.seconds for run in runs),
            "inferred": ALGORITHMS[name].inferred if name in ALGORITHMS.data else "",
        }  # fmt: skip

    def _reached(self, level: float, rule: ThresholdRule) -> dict[str, Any]:
        members = self.study.members.items()
        return {
            "arrival": {k: arrivals(self.study, own, level, rule)._asdict() for k, own in members},
            "late_stage_mean": scores.late_means(self.study, level, rule)[0] or None,
        }


def study_result(
    study: Study, histories: "Mapping[str, Sequence[History]] | None" = None
) -> StudyResult:
    """Compute the result of a study."""
    ends = {label: scores.finals(runs) for label, runs in study.members.items()}
    tests = family(ends, study.pairs)
    level = study.threshold
    late, why_not = ({}, "") if level is None else scores.late_means(study, level)
    evidence = {test.second: test for test in tests if test.first == study.reference}
    found = []
    for label, runs in study.members.items():
        # Unfinished and stopped runs have not moved all their bytes.
        longest = [run for run in runs if run.done == max(other.done for other in runs)]
        rules = () if level is None else RULES
        reached = {rule: arrivals(study, runs, level or 0.0, rule) for rule in rules}
        own = AlgorithmResult(
            label, runs[0].algorithm, ends[label], *scores.mean_and_sd(ends[label].values()),
            arrivals={rule: reached[rule].averaged if reached else None for rule in RULES},
            arrivals_each=tuple(reached[RULES[0]].runs) if reached else (None,) * len(runs),
            late=late.get(label), evidence=evidence.get(label),
            traffic={k: statistics.fmean(r.traffic[k] for r in longest) for k in runs[0].traffic},
            seconds=statistics.fmean(run.seconds for run in longest),
            diverged=sum(run.complete and run.seed not in ends[label] for run in runs),
            unfinished=sum(not run.complete for run in runs), runs=len(runs),
            curve=scores.drawn_curve(runs), dropped=sum(run.dropped for run in runs),
        )  # fmt: skip
        found.append(own)
    notes = (*filter(None, [why_not]), *_notes(study, ends))
    return StudyResult(study, tuple(found), tuple(tests), notes, histories or {})


def _notes(study: Study, ends: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Describe runs that fell back, diverged or are missing; a mean hides them."""
    for label, runs in study.members.items():
        for run in runs if study.higher_is_better else ():
            final = ends[label].get(run.seed, math.nan)
            height = scores.fell_from(list(run.scored.values()), final, window=study.window)
            if height is not None:
                had, has = (fmt.value_text(value, study.metric) for value in (height, final))
                yield f"{label}, seed {run.seed}, fell back from {had} to {has}."
    reference = set(ends[study.reference])
    for label, runs in study.members.items():
        lost = [str(run.seed) for run in runs if run.complete and run.seed not in ends[label]]
        if lost:
            which = f"{len(lost)} of {len(runs)} runs diverged (seed {', '.join(lost)})"
            yield f"{label}: {which} and are left out of means and tests."
        if unusual := sorted({client.name for run in runs for client in run.unusual}):
            clients = f"{fmt.count_text(len(unusual), 'client')} were rejected or flagged"
            names = ", ".join(unusual[:3]) + ", ..." * (len(unusual) > 3)
            yield f"{label}: uploads of {clients} ({names})."
        left = [run for run in runs if not run.complete]
        if left:
            states = [f"seed {one.seed} at round {one.done} of {one.asked or '?'}" for one in left]
            yield f"{label} is not finished ({', '.join(states)}): no final value for it."
        if ends[label] and reference and set(ends[label]) != reference:
            shared = fmt.count_text(len(reference & set(ends[label])), "finished seed")
            yield f"{label} shares {shared} with {study.reference}."
    if study.awaited:
        counts = [f"{label} ({fmt.count_text(n, 'run')})" for label, n in study.awaited.items()]
        yield f"Still to come: {', '.join(counts)}."
    if max(map(len, ends.values())) < 2:
        yield "No algorithm has two finished seeds: there is no spread and no test."


def summary(result: StudyResult) -> list[str]:
    """Describe the leader, its lead and the test of it in a few sentences."""
    if not result.ranked:
        return [f"No run on {result.study.name} has finished without diverging."]
    awaited = sum(result.study.awaited.values())
    total = len(result.study.runs) + awaited
    counts = {
        "diverged and are left out of means and tests": sum(s.diverged for s in result.scores),
        "are not finished": sum(score.unfinished for score in result.scores) + awaited,
    }
    lost = [f"{count} of {total} runs {words}." for words, count in counts.items() if count]
    return [*_leader(result), *_speed(result), *lost]


def _leader(result: StudyResult) -> Iterator[str]:
    """Name the best algorithm, its lead and the tests of it."""
    study, (best, *others) = result.study, result.ranked
    seeds = len(best.finals)
    over = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    value, what = fmt.value_text(best.mean, study.metric), f"final {study.metric} on {study.name}"
    if not others:
        yield f"{best.label} ends at {value} {what} ({over})."
        return
    gap = fmt.points_text((best.mean or 0.0) - (others[0].mean or 0.0), study.metric)
    yield f"{best.label} has the best {what}, {value} ({over}), {gap} ahead of {others[0].label}."
    tested = [score for score in result.scores if score.test is not None]
    how = f"paired t-test{'s' * (len(tested) > 1)}, level {LEVEL:g}"
    if len(result.tests) > 1:
        how += f", Holm over {len(result.tests)} tests"
    if best.label != study.reference and best.test is not None:
        lead = fmt.points_text(best.test.mean_difference, study.metric)
        verdict = "significant" if best.significant else "not significant"
        over, how = f"the reference {study.reference}", f"{how}; p = {fmt.p_text(best.adjusted)}"
        yield f"Its lead of {lead} over {over} is {verdict} ({how})."
    elif best.label == study.reference and tested:
        won = sum(score.significant for score in tested)
        against = f"against {others[0].label} p = {fmt.p_text(others[0].adjusted)}"
        yield f"Its lead is significant against {won} of {len(tested)} others ({how}; {against})."
    else:
        yield "There are too few seeds for a test of its lead."


def _speed(result: StudyResult) -> Iterator[str]:
    study = result.study
    if study.threshold is None:
        return
    # Unfinished algorithms may still reach it.
    finished = [score for score in result.scores if score.finals]
    reached = {score.label: score.arrivals[RULES[0]] for score in finished}
    known = {label: round_ for label, round_ in reached.items() if round_ is not None}
    # A single value, also the final one, may lie above the threshold.
    goal = f"{fmt.goal_text(study.threshold, study.metric)} ({scores.averaged_words(study.window)})"
    if not known:
        each = [round_ for score in finished for round_ in score.arrivals_each]
        alone = sum(round_ is not None for round_ in each)
        yield f"No mean curve holds {goal}; {alone} of {len(each)} single runs do."
        return
    first = min(known.values())
    names = listed([label for label, round_ in known.items() if round_ == first])
    yield f"First to hold {goal}, after {fmt.count_text(first, 'round')}: {names}."
