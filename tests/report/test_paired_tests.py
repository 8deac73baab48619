"""The table of paired tests: known answers, and words that say what it can and cannot show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedzmg.report.tables.study import paired_tests
from fedzmg.results.reading import read
from fedzmg.results.study_result import StudyResult, study_result

FINALS = {
    "fedzmg": [0.42, 0.40, 0.43, 0.41, 0.44],
    "fedavg": [0.35, 0.36, 0.34, 0.33, 0.36],
    "fedadam": [0.41, 0.41, 0.40, 0.42, 0.43],
}


def judged(
    write_run: Any, place: Path, seeds: int, plan: dict[str, Any] | None = None
) -> StudyResult:
    for name, values in FINALS.items():
        for seed, value in enumerate(values[:seeds]):
            write_run(f"all/{name}/seed-{seed}", name, seed, [value] * 4)
    if plan is not None:
        text = f"algorithms = {list(FINALS)}\nseeds = {list(range(seeds))}\n"
        text += "".join(f"{key} = {value!r}\n" for key, value in plan.items())
        (place / "all" / "study.toml").write_text(text)
    return study_result(read([place / "all"]).studies[0])


def test_every_column_agrees_with_an_independent_computation(
    write_run: Any, tmp_path: Path
) -> None:
    table = paired_tests(judged(write_run, tmp_path, 5))
    assert table is not None
    found = {record["second"]: record for record in table.records}
    raw = {}
    for name in ("fedavg", "fedadam"):
        ours, theirs = FINALS["fedzmg"], FINALS[name]
        expected = stats.ttest_rel(ours, theirs)
        low, high = expected.confidence_interval(0.95)
        flipped = stats.permutation_test(
            (ours, theirs), lambda a, b, axis: (a - b).sum(axis), permutation_type="samples",
            vectorized=True,
        )  # fmt: skip
        record, raw[name] = found[name], expected.pvalue
        assert record["t"] == pytest.approx(expected.statistic)
        assert record["p"] == pytest.approx(expected.pvalue)
        assert (record["ci_low"], record["ci_high"]) == pytest.approx((low, high))
        assert record["p_sign_flip"] == pytest.approx(flipped.pvalue)
        assert record["d_z"] == pytest.approx(expected.statistic / 5**0.5)
    assert found["fedavg"]["p_holm"] == pytest.approx(2 * raw["fedavg"])
    assert found["fedadam"]["p_holm"] == pytest.approx(raw["fedadam"])
    # All five differences from fedavg are positive: nothing can be more extreme.
    assert found["fedavg"]["p_sign_flip"] == found["fedavg"]["p_sign_flip_floor"] == 2 / 32
    bold = [row[0].text for row in table.rows if any(cell.kind == "yes" for cell in row)]
    assert bold == ["fedzmg minus fedavg"]


def test_a_study_may_ask_for_every_pair(write_run: Any, tmp_path: Path) -> None:
    result = judged(write_run, tmp_path, 5, {"tests": "pairs"})
    assert [(one.first, one.second) for one in result.tests] == [
        ("fedzmg", "fedavg"), ("fedzmg", "fedadam"), ("fedavg", "fedadam"),
    ]  # fmt: skip
    smallest = min(result.tests, key=lambda one: one.test.p)
    assert smallest.p_holm == pytest.approx(3 * smallest.test.p)
    assert result.scores[1].evidence is result.tests[0]


def test_one_seed_has_no_table(write_run: Any, tmp_path: Path) -> None:
    assert paired_tests(judged(write_run, tmp_path, 1)) is None
