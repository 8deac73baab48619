"""Who is ahead, by how much, and whether that means anything: a few sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.results.averaging import RULES, averaged_words
from fedzmg.results.formatting import count_text, goal_text, p_text, points_text, value_text
from fedzmg.results.grids import on_the_border
from fedzmg.results.grouping import Study
from fedzmg.results.study_result import LEVEL, AlgorithmResult, StudyResult


def summary(outcome: StudyResult, grids: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """The sentences at the head of a page.

    Args:
        outcome: of a study.
        grids: what ``grid.json`` says of the grids beside it.
    """
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
    return [*sentences, *_speed(outcome), *_border(study, grids), *_trouble(outcome)]


def _lead(
    study: Study, best: AlgorithmResult, second: AlgorithmResult, value: str, over: str
) -> str:
    gap = points_text((best.mean or 0.0) - (second.mean or 0.0), study.metric)
    what = f"final {study.metric} on {study.name}"
    if best.mean == second.mean:
        return f"{best.label} and {second.label} share the best {what}, {value} ({over})."
    return f"{best.label} has the best {what}, {value} ({over}), {gap} ahead of {second.label}."


def _tested(
    outcome: StudyResult, best: AlgorithmResult, ranked: Sequence[AlgorithmResult]
) -> list[str]:
    study = outcome.study
    tested = [score for score in outcome.scores if score.test is not None]
    if not tested:
        return ["There are too few seeds for a test."]
    family = len(outcome.tests)
    corrected = f", Holm over {family} tests" if family > 1 else ""
    if best.label != study.reference:
        return [_over_the_reference(study, best, ranked[1], corrected)]
    count = len(tested)
    won = [score.label for score in tested if score.significant]
    if count == 1:
        verdict = "significant" if won else "not significant"
        p = p_text(tested[0].adjusted)
        return [f"The difference is {verdict} at the {LEVEL:g} level (paired t-test, p = {p})."]
    if len(won) == count:
        everyone = "both others" if count == 2 else f"all {count} others"
        return [
            f"It is significantly ahead of {everyone} (paired t-tests{corrected}, level {LEVEL:g})."
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


def _over_the_reference(
    study: Study, best: AlgorithmResult, second: AlgorithmResult, corrected: str
) -> str:
    test = best.test
    if test is None:
        return f"Its lead over the reference {study.reference} cannot be tested."
    verdict = "is significant" if best.significant else "is not significant"
    gap = points_text(test.mean_difference, study.metric)
    lead = f"Its lead of {gap} over the reference {study.reference}"
    if second.label == study.reference:
        lead = "That lead"
    return (
        f"{lead} {verdict} at the {LEVEL:g} level (paired t-test, {test.n} seeds, "
        f"p = {p_text(best.adjusted)}{corrected})."
    )


def _speed(outcome: StudyResult) -> list[str]:
    study = outcome.study
    if study.threshold is None:
        return []
    goal = goal_text(study.threshold, study.metric)
    # What is still under way may arrive yet.
    finished = [score for score in outcome.scores if score.finals]
    reached = [(score.arrivals[RULES[0]], score.label) for score in finished]
    arrived = [(index, label) for index, label in reached if index is not None]
    # A single value may lie above it, also the final one.
    goal = f"{goal} ({averaged_words(study.window)})"
    if not arrived:
        none = f"None holds {goal}" if len(reached) > 1 else f"It does not hold {goal}"
        each = [index for score in finished for index in score.arrivals_each]
        alone = sum(index is not None for index in each)
        if not alone:
            return [f"{none}."]
        do = "does" if alone == 1 else "do"
        return [f"{none} on average over its seeds, though {alone} of {len(each)} runs {do}."]
    first = min(index for index, _ in arrived)
    when = f"at index {first} (after {count_text(first + 1, 'round')})"
    if len(reached) == 1:
        return [f"It first holds {goal} {when}."]
    firsts = [label for index, label in arrived if index == first]
    who = " and ".join([", ".join(firsts[:-1]), firsts[-1]] if len(firsts) > 1 else firsts)
    verb = "are" if len(firsts) > 1 else "is"
    return [f"{who} {verb} first to hold {goal}, {when}."]


def _border(study: Study, grids: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rates that might be better if more had been tried."""
    found = on_the_border(study, grids)
    if not found:
        return []
    named = [f"{label} ({', '.join(axes)})" for label, axes in found.items()]
    whose = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    return [
        f"The rates of {whose} lie on the border of the grid that chose them: a wider grid may do "
        "better."
    ]


def _trouble(outcome: StudyResult) -> list[str]:
    diverged = sum(score.diverged for score in outcome.scores)
    awaited = sum(outcome.study.awaited.values())
    unfinished = sum(score.unfinished for score in outcome.scores) + awaited
    total = len(outcome.study.runs) + awaited
    sentences = []
    if diverged:
        sentences.append(f"{diverged} of {total} runs diverged and count as the worst value.")
    if unfinished:
        sentences.append(f"{unfinished} of {total} runs are not finished.")
    return sentences
