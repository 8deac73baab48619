"""Tables of clients and of paired tests: known answers, and damage in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from scipy import stats

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.report.html.page import render
from fedzmg.report.tables.clients import clients
from fedzmg.report.tables.study import paired_tests
from fedzmg.results.reading import read
from fedzmg.results.scores import metric_bands, sorted_curves
from fedzmg.results.study_result import StudyResult, study_result
from fedzmg.simulation import ClientMetrics
from fedzmg.storage.client_metrics import CLIENTS, read_clients

# Ten clients: the worst tenth is the first, the median lies between the fifth and the sixth.
EVEN = np.arange(1, 11) / 10
Line = Callable[..., dict[str, Any]]


def keep(directory: Path, *metrics: np.ndarray, last: int = 10, population: int = 10) -> None:
    who = np.arange(len(metrics[0]))
    rounds = [1 + 3 * i for i in range(len(metrics) - 1)] + [last]
    RunDirectory(directory).save_clients(
        [
            ClientMetrics(r, "training", population, who, who + 5, m, 1 - m)
            for r, m in zip(rounds, metrics, strict=True)
        ]
    )


@pytest.fixture
def known(study: Path, log_line: Line) -> Path:
    """Three seeds of two algorithms; clients are shifted by 0, 0.01 and 0.02 with the seed."""
    for name, top in (("fedzmg", 0.0), ("fedavg", -0.05)):
        for seed in range(3):
            place = study / name / f"seed-{seed}"
            keep(place, EVEN / 2, EVEN + top + 0.01 * seed)
            lines = [
                json.loads(text) for text in (place / "metrics.jsonl").read_text().split("\n")[:-1]
            ]
            for i, one in enumerate(lines):
                one["client_loss"] = [0.1, 1.0 / (i + 1), 2.0 / (i + 1), 4.0 / (i + 1), 9.0]
            (place / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return study


def test_table_by_hand(known: Path) -> None:
    sheet = clients(study_result(read([known]).studies[0]))
    assert sheet is not None
    assert sheet.heads == (
        "algorithm", "mean", "deviation", "median", "worst 10 %", "best 10 %", "clients below 50 %",
    )  # fmt: skip
    ours, theirs = sheet.rows
    assert [cell.text for cell in ours] == [
        "fedzmg", "56.00 ± 1.00 %", "28.72 ± 0.00 %", "56.00 ± 1.00 %", "11.00 ± 1.00 %",
        "101.00 ± 1.00 %", "40.00 ± 0.00 %",
    ]  # fmt: skip
    assert [cell.text for cell in theirs][4:] == [
        "6.00 ± 1.00 %",
        "96.00 ± 1.00 %",
        "50.00 ± 0.00 %",
    ]
    assert [cell.kind for cell in ours] == ["", "best", "", "best", "best", "best", "best"]
    assert "10 of 10 clients, all that have any" in sheet.caption
    assert "own training examples" in sheet.caption
    assert len(sheet.records) == 6
    assert sheet.records[0]["worst_tenth"] == EVEN[0]


def test_missing_and_diverged_runs_are_counted(known: Path, log_line: Line) -> None:
    (known / "fedzmg" / "seed-0" / CLIENTS).unlink()
    lines = [log_line(r, 0.1, diverged=r >= 4) for r in range(1, 11)]
    (known / "fedavg" / "seed-1" / "metrics.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in lines)
    )
    text = render(read([known]), drawn={})
    assert "Clients: 1 of 6 runs have no metric by client" in text
    assert "Clients: 1 of 6 runs diverged" in text
    sheet = clients(study_result(read([known]).studies[0]))
    assert sheet is not None
    assert [(r["algorithm"], r["seed"]) for r in sheet.records] == [
        ("fedzmg", 1), ("fedzmg", 2), ("fedavg", 0), ("fedavg", 2)
    ]  # fmt: skip
    for path in known.glob(f"*/*/{CLIENTS}"):
        path.unlink()
    without = render(read([known]), drawn={})
    assert "Clients: 6 of 6 runs have no metric by client" in without
    assert "<h3>Clients</h3>" not in without


def test_worst_first_whichever_way_is_better(tmp_path: Path) -> None:
    keep(tmp_path, EVEN)
    found: Any = SimpleNamespace(clients=read_clients(tmp_path))
    assert read_clients(tmp_path / "elsewhere") == ()
    [up], [down] = (sorted_curves([found], higher_is_better=h) for h in (True, False))
    assert (up[0], up[50], up[100]) == pytest.approx((0.1, 0.55, 1.0))
    assert (down[0], down[100]) == pytest.approx((1.0, 0.1))
    assert metric_bands([found]) is None


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b'\x08\0\0\0\0\0\0\0{"a":1}'])
def test_damage_is_one_line(known: Path, content: bytes) -> None:
    (known / "fedavg" / "seed-1" / CLIENTS).write_bytes(content)
    with pytest.raises(InputError, match=r"clients\.safetensors cannot be read") as caught:
        read([known])
    assert "\n" not in str(caught.value)


def test_table_of_another_shape_is_damage(tmp_path: Path) -> None:
    tensors = {
        "client": np.arange(3, dtype=np.int32),
        "examples": np.ones(3, np.int32),
        "round": np.ones(1, np.int32),
        "metric": np.ones((1, 2)),
        "loss": np.ones((1, 2)),
    }
    content = safetensors.numpy.save(tensors, {"part": "training", "population": "3"})
    (tmp_path / CLIENTS).write_bytes(content)
    with pytest.raises(InputError, match=r"a table of shape \(1, 2\)"):
        read_clients(tmp_path)


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
            write_run(place / f"all/{name}/seed-{seed}", name, seed, [value] * 4)
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
    assert paired_tests(judged(write_run, tmp_path / "one", 1)) is None
