"""The result of a study in a few sentences: the leader, its lead and the test of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedzmg.results.averaging import averaged_words
from fedzmg.results.formatting import count_text, goal_text, p_text, points_text, value_text
from fedzmg.results.grids import on_the_border
from fedzmg.results.scores import RULES
from fedzmg.results.significance import LEVEL
from fedzmg.results.study_result import StudyResult


def summary(result: StudyResult, grids: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Return the sentences at the head of a page.

    Args:
        result: of a study.
        grids: contents of the ``grid.json`` files beside it.
    """
    study, ranked = result.study, result.ranked
    if not ranked:
        if any(score.diverged for score in result.scores):
            return [f"Every finished run on {study.name} diverged."]
        return [f"No run on {study.name} is finished yet."]
    best = ranked[0]
    seeds = len(best.finals)
    over = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    value, what = value_text(best.mean, study.metric), f"final {study.metric} on {study.name}"
    if len(ranked) == 1:
        sentences = [f"{best.label} ends at {value} {what} ({over})."]
    elif best.mean == ranked[1].mean:
        shared = f"{best.label} and {ranked[1].label} share the best {what}, {value} ({over})."
        sentences = [shared, _tested(result)]
    else:
        gap = points_text((best.mean or 0.0) - (ranked[1].mean or 0.0), study.metric)
        ahead = f"{gap} ahead of {ranked[1].label}"
        sentences = [f"{best.label} has the best {what}, {value} ({over}), {ahead}."]
        sentences.append(_tested(result))
    return [*sentences, *_speed(result), *_border(result, grids), *_lost_runs(result)]


def _tested(result: StudyResult) -> str:
    """Describe the tests of the leader's lead."""
    best, second = result.ranked[:2]
    reference, metric = result.study.reference, result.study.metric
    tested = [score for score in result.scores if score.test is not None]
    corrected = f", Holm over {len(result.tests)} tests" if len(result.tests) > 1 else ""
    if not tested:
        return "There are too few seeds for a test."
    if best.label != reference:
        if best.test is None:
            return f"Its lead over the reference {reference} cannot be tested."
        verdict = "is significant" if best.significant else "is not significant"
        gap = points_text(best.test.mean_difference, metric)
        direct = second.label == reference
        lead = "That lead" if direct else f"Its lead of {gap} over the reference {reference}"
        return (
            f"{lead} {verdict} at the {LEVEL:g} level (paired t-test, {best.test.n} seeds, "
            f"p = {p_text(best.adjusted)}{corrected})."
        )
    count, won = len(tested), sum(score.significant for score in tested)
    against = f"against {second.label} p = {p_text(second.adjusted)}"
    if count == 1:
        verdict, p = "significant" if won else "not significant", p_text(tested[0].adjusted)
        return f"The difference is {verdict} at the {LEVEL:g} level (paired t-test, p = {p})."
    if won == count:
        all_others = "both others" if count == 2 else f"all {count} others"
        family = f"paired t-tests{corrected}, level {LEVEL:g}"
        return f"It is significantly ahead of {all_others} ({family})."
    if not won:
        return (
            f"None of its leads is significant at the {LEVEL:g} level (paired t-tests{corrected}; "
            f"{against})."
        )
    return (
        f"Its lead is significant against {won} of {count} others (paired t-tests{corrected}, "
        f"level {LEVEL:g}; {against})."
    )


def _speed(result: StudyResult) -> list[str]:
    """Name the algorithm that reaches the threshold first."""
    study = result.study
    if study.threshold is None:
        return []
    # Unfinished algorithms may still reach it.
    finished = [score for score in result.scores if score.finals]
    reached = {score.label: score.arrivals[RULES[0]] for score in finished}
    known = {label: round_ for label, round_ in reached.items() if round_ is not None}
    # A single value, also the final one, may lie above the threshold.
    goal = f"{goal_text(study.threshold, study.metric)} ({averaged_words(study.window)})"
    if not known:
        none = f"None holds {goal}" if len(reached) > 1 else f"It does not hold {goal}"
        each = [round_ for score in finished for round_ in score.arrivals_each]
        alone = sum(round_ is not None for round_ in each)
        if not alone:
            return [f"{none}."]
        do = "does" if alone == 1 else "do"
        return [f"{none} on average over its seeds, though {alone} of {len(each)} runs {do}."]
    first = min(known.values())
    when = f"after {count_text(first, 'round')}"
    if len(reached) == 1:
        return [f"It first holds {goal} {when}."]
    firsts = [label for label, round_ in known.items() if round_ == first]
    verb = "are" if len(firsts) > 1 else "is"
    return [f"{_listed(firsts)} {verb} first to hold {goal}, {when}."]


def _border(result: StudyResult, grids: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name learning rates that a wider grid might improve."""
    found = on_the_border(result.study, grids)
    if not found:
        return []
    named = _listed([f"{label} ({', '.join(axes)})" for label, axes in found.items()])
    return [
        f"The learning rates of {named} lie on the border of the grid that chose them: a wider "
        "grid may do better."
    ]


def _lost_runs(result: StudyResult) -> list[str]:
    diverged = sum(score.diverged for score in result.scores)
    awaited = sum(result.study.awaited.values())
    unfinished = sum(score.unfinished for score in result.scores) + awaited
    total = len(result.study.runs) + awaited
    sentences = []
    if diverged:
        sentences.append(
            f"{diverged} of {total} runs diverged and are left out of means and tests."
        )
    if unfinished:
        sentences.append(f"{unfinished} of {total} runs are not finished.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    """Join names with commas and a final "and"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
