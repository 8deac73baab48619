"""The table of paired tests and its reading guide."""

from __future__ import annotations

from fedzmg.report.tables.table import NOTHING, Cell, Record, Table
from fedzmg.results.formatting import NONE, count_text, p_text, range_text, signed_text, value_text
from fedzmg.results.significance import FamilyTest
from fedzmg.results.study_result import LEVEL, StudyResult

_HEADS = (
    "difference", "mean", "95 % interval", "t", "p", "Holm p", "sign flip p", "d_z", "seeds",
    "seeds needed",
)  # fmt: skip


def paired_tests(result: StudyResult) -> Table | None:
    """Make the table of all tests of a study; None if there are none."""
    study, tests = result.study, result.tests
    if not tests:
        return None
    rows = [_row(one, study.metric) for one in tests]
    records = [_record(one) for one in tests]
    title = f"Paired tests on {study.name}"
    return Table(
        "tests", title, _HEADS, rows, _caption(result), records, advice=_advice(result)
    )  # fmt: skip


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


def _caption(result: StudyResult) -> str:
    diverged = sum(score.diverged for score in result.scores)
    lost = f"; {count_text(diverged, 'diverged run')} left out" if diverged else ""
    return (
        f"Differences of the final {result.study.metric}, paired by seed; p: two-sided paired "
        f"t-test; Holm: corrected for the {count_text(len(result.tests), 'test')} of this table, "
        f"bold where it is at most {LEVEL:g}; sign flip: exact, without assuming a normal "
        "distribution; d_z: mean difference over its standard deviation; seeds needed: to find an "
        f"effect of this size with a chance of 80 % at the level {LEVEL:g}{lost}."
    )


def _advice(result: StudyResult) -> str:
    words = [
        "How to read it: a difference is trustworthy when its interval leaves out zero and its "
        f"Holm p is at most {LEVEL:g}; where more seeds are needed than there are, a missing "
        "difference proves nothing.",
    ]
    # The most seeds give the lowest floor.
    seeds = max(one.test.n for one in result.tests)
    floor = min(one.smallest_sign_flip for one in result.tests)
    if floor > 0.001:
        text = f"With {seeds} seeds the sign-flip p cannot fall below 2/{2**seeds} = {floor:.3g}"
        never = f", so that alone it can never be significant at {LEVEL:g}" * (floor > LEVEL)
        words.append(f"{text}{never}.")
    if any(one.sign_flip is None for one in result.tests):
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
