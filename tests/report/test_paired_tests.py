"""The table of paired tests: known answers, and words that say what it can and cannot show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from fedzmg.report.tables.paired_tests import paired_tests
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


@pytest.mark.parametrize(("seeds", "floor"), [(5, "2/32 = 0.0625,"), (3, "2/8 = 0.25,")])
def test_the_floor_of_the_sign_flip_is_named(
    write_run: Any, tmp_path: Path, seeds: int, floor: str
) -> None:
    table = paired_tests(judged(write_run, tmp_path, seeds))
    assert table is not None
    assert floor in table.advice


def test_a_study_may_ask_for_every_pair(write_run: Any, tmp_path: Path) -> None:
    outcome = judged(write_run, tmp_path, 5, {"tests": "pairs"})
    assert [(one.first, one.second) for one in outcome.tests] == [
        ("fedzmg", "fedavg"), ("fedzmg", "fedadam"), ("fedavg", "fedadam"),
    ]  # fmt: skip
    smallest = min(outcome.tests, key=lambda one: one.test.p)
    assert smallest.p_holm == pytest.approx(3 * smallest.test.p)
    assert outcome.scores[1].evidence is outcome.tests[0]


def test_one_seed_has_no_table(write_run: Any, tmp_path: Path) -> None:
    assert paired_tests(judged(write_run, tmp_path, 1)) is None


def test_diverged_runs_are_left_out_as_the_caption_says(
    write_run: Any, log_line: Any, tmp_path: Path
) -> None:
    outcome = judged(write_run, tmp_path, 3)
    assert "diverged" not in paired_tests(outcome).caption  # type: ignore[union-attr]
    lost = tmp_path / "all" / "fedavg" / "seed-1"
    lines = [log_line(r, 0.1, diverged=r >= 2) for r in range(1, 5)]
    (lost / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    table = paired_tests(study_result(read([tmp_path / "all"]).studies[0]))
    assert table is not None
    found = {record["second"]: record["difference"] for record in table.records}
    # 0.42 - 0.35 and 0.43 - 0.34.
    assert found["fedavg"] == pytest.approx((0.07 + 0.09) / 2)
    assert "1 diverged" in table.caption
