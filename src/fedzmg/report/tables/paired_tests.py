"""The table of paired tests, and how to read it."""

from __future__ import annotations

from fedzmg.report.tables.sheet import NOTHING, Cell, Record, Sheet
from fedzmg.results.formatting import (
    NONE,
    count_text,
    p_text,
    range_text,
    signed_text,
    value_text,
)
from fedzmg.results.significance import FamilyTest
from fedzmg.results.study_result import LEVEL, StudyResult


def paired_tests(outcome: StudyResult) -> Sheet | None:
    """Every test of the family; None if there is none."""
    study = outcome.study
    if not outcome.tests:
        return None
    heads = (
        "difference", "mean", "95 % interval", "t", "p", "p (Holm)", "p (sign flip)", "d_z",
        "seeds", "seeds needed",
    )  # fmt: skip
    return Sheet(
        "tests",
        f"Paired tests on {study.name}",
        heads,
        [_row(one, study.metric) for one in outcome.tests],
        _caption(outcome),
        [_record(one) for one in outcome.tests],
        advice=_advice(outcome),
    )


def _row(one: FamilyTest, metric: str) -> list[Cell]:
    test = one.test
    return [
        Cell(f"{one.first} minus {one.second}"),
        Cell(value_text(test.mean_difference, metric, signed=True), test.mean_difference),
        Cell(range_text(test.ci_low, test.ci_high, metric)),
        Cell(signed_text(test.t), test.t),
        Cell(p_text(test.p), test.p),
        Cell(p_text(one.p_holm), one.p_holm, "yes" if one.significant else ""),
        Cell(p_text(one.sign_flip), one.sign_flip) if one.sign_flip is not None else NOTHING,
        Cell(signed_text(test.effect_size), test.effect_size),
        Cell(str(test.n), test.n),
        Cell(f"{one.seeds_needed:,}", one.seeds_needed) if one.seeds_needed else NOTHING,
    ]


def _caption(outcome: StudyResult) -> str:
    family = count_text(len(outcome.tests), "test")
    return (
        f"Differences of the final {outcome.study.metric}, paired by seed; p: two-sided paired "
        f"t-test; Holm: corrected for the {family} of this table, bold where "
        f"it is at most {LEVEL:g}; sign flip: exact, without assuming a normal distribution; d_z: "
        "mean difference over its standard deviation; seeds needed: to find an effect of this size "
        f"with a chance of 80 % at the level {LEVEL:g}{_lost(outcome)}."
    )


def _lost(outcome: StudyResult) -> str:
    """Return a remark on diverged runs, if there are any."""
    diverged = sum(score.diverged for score in outcome.scores)
    return f"; {count_text(diverged, 'diverged run')} left out" if diverged else ""


def _advice(outcome: StudyResult) -> str:
    words = [
        "How to read it: a difference is trustworthy when its interval leaves out zero and its "
        f"Holm p is at most {LEVEL:g}; where more seeds are needed than there are, a missing "
        "difference proves nothing.",
    ]
    # The most seeds give the lowest floor.
    seeds = max(one.test.n for one in outcome.tests)
    floor = min(one.smallest_sign_flip for one in outcome.tests)
    with_seeds = f"With {seeds} seeds the sign-flip p cannot fall below 2/{2**seeds}"
    if floor > LEVEL:
        words.append(
            f"{with_seeds} = {floor:.3g}, so that alone it can never be significant at {LEVEL:g}, "
            "however clear the difference."
        )
    elif floor > 0.001:
        words.append(f"{with_seeds} = {floor:.3g}.")
    if any(one.sign_flip is None for one in outcome.tests):
        words.append(f"{NONE} under sign flip: too many seeds to try every pattern of signs.")
    return " ".join(words)


def _record(one: FamilyTest) -> Record:
    test = one.test
    return {
        "first": one.first,
        "second": one.second,
        "difference": test.mean_difference,
        "ci_low": test.ci_low,
        "ci_high": test.ci_high,
        "t": test.t,
        "p": test.p,
        "p_holm": one.p_holm,
        "p_sign_flip": one.sign_flip,
        "p_sign_flip_floor": one.smallest_sign_flip,
        "d_z": test.effect_size,
        "seeds": test.n,
        "seeds_needed": one.seeds_needed,
    }
