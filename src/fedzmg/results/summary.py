"""The result of a study in a few sentences: the leader, its lead and the test of it."""

from collections.abc import Iterator

from fedzmg.errors import listed
from fedzmg.results.formatting import count_text, goal_text, p_text, points_text, value_text
from fedzmg.results.scores import RULES, averaged_words
from fedzmg.results.significance import LEVEL
from fedzmg.results.study_result import StudyResult


def summary(result: StudyResult) -> list[str]:
    """Return the sentences at the head of a page."""
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
    value, what = value_text(best.mean, study.metric), f"final {study.metric} on {study.name}"
    if not others:
        yield f"{best.label} ends at {value} {what} ({over})."
        return
    gap = points_text((best.mean or 0.0) - (others[0].mean or 0.0), study.metric)
    yield f"{best.label} has the best {what}, {value} ({over}), {gap} ahead of {others[0].label}."
    tested = [score for score in result.scores if score.test is not None]
    how = f"paired t-test{'s' * (len(tested) > 1)}, level {LEVEL:g}"
    if len(result.tests) > 1:
        how += f", Holm over {len(result.tests)} tests"
    if best.label != study.reference and best.test is not None:
        lead = points_text(best.test.mean_difference, study.metric)
        verdict = "significant" if best.significant else "not significant"
        over, how = f"the reference {study.reference}", f"{how}; p = {p_text(best.adjusted)}"
        yield f"Its lead of {lead} over {over} is {verdict} ({how})."
    elif best.label == study.reference and tested:
        won = sum(score.significant for score in tested)
        against = f"against {others[0].label} p = {p_text(others[0].adjusted)}"
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
    goal = f"{goal_text(study.threshold, study.metric)} ({averaged_words(study.window)})"
    if not known:
        each = [round_ for score in finished for round_ in score.arrivals_each]
        alone = sum(round_ is not None for round_ in each)
        yield f"No mean curve holds {goal}; {alone} of {len(each)} single runs do."
        return
    first = min(known.values())
    names = listed([label for label, round_ in known.items() if round_ == first])
    yield f"First to hold {goal}, after {count_text(first, 'round')}: {names}."
