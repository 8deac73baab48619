"""Single clients in a report: the table by hand, the charts, and a line where nothing was kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from fedzmg.errors import InputError
from fedzmg.experiment.run_directory import RunDirectory
from fedzmg.report.html.page import render
from fedzmg.report.tables.study import clients as sheet_of
from fedzmg.results.over_clients import loss_bands, metric_bands, sorted_curves
from fedzmg.results.reading import read
from fedzmg.results.study_result import study_result
from fedzmg.simulation import ClientMetrics
from fedzmg.storage.client_metrics import CLIENTS, read_clients

# Ten clients: the worst tenth is the first, the median lies between the fifth and the sixth.
EVEN = np.arange(1, 11) / 10
Line = Callable[..., dict[str, Any]]


def keep(directory: Path, *metrics: np.ndarray, last: int = 10, population: int = 10) -> None:
    clients = np.arange(len(metrics[0]))
    rounds = [1 + 3 * i for i in range(len(metrics) - 1)] + [last]
    RunDirectory(directory).save_clients(
        [
            ClientMetrics(r, "training", population, clients, clients + 5, m, 1 - m)
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
    sheet = sheet_of(study_result(read([known]).studies[0]))
    assert sheet is not None
    assert sheet.heads == (
        "algorithm", "mean", "deviation", "median", "worst 10 %", "best 10 %", "clients below 50 %",
    )  # fmt: skip
    ours, theirs = sheet.rows
    assert [cell.text for cell in ours] == [
        "fedzmg", "56.00 ± 1.00 %", "28.72 ± 0.00 %", "56.00 ± 1.00 %", "11.00 ± 1.00 %",
        "101.00 ± 1.00 %", "40.0 ± 0.0 %",
    ]  # fmt: skip
    assert [cell.text for cell in theirs][4:] == [
        "6.00 ± 1.00 %",
        "96.00 ± 1.00 %",
        "50.0 ± 0.0 %",
    ]
    assert [cell.kind for cell in ours] == ["", "best", "", "best", "best", "best", "best"]
    assert "all 10 clients that have any" in sheet.caption
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
    sheet = sheet_of(study_result(read([known]).studies[0]))
    assert sheet is not None
    assert [(r["algorithm"], r["seed"]) for r in sheet.records] == [
        ("fedzmg", 1), ("fedzmg", 2), ("fedavg", 0), ("fedavg", 2)
    ]  # fmt: skip
    for path in known.glob(f"*/*/{CLIENTS}"):
        path.unlink()
    without = render(read([known]), drawn={})
    assert "Clients: all runs have no metric by client" in without
    assert "<h3>Clients</h3>" not in without


def test_worst_first_whichever_way_is_better(tmp_path: Path) -> None:
    keep(tmp_path, EVEN)
    found = read_clients(tmp_path)
    assert found is not None
    assert read_clients(tmp_path / "elsewhere") is None
    [up], [down] = (sorted_curves([found], higher_is_better=h) for h in (True, False))
    assert (up[0], up[50], up[100]) == pytest.approx((0.1, 0.55, 1.0))
    assert (down[0], down[100]) == pytest.approx((1.0, 0.1))
    assert metric_bands([found]) is None


def test_bands_by_hand() -> None:
    losses = [[0.0, 1.0, 2.0, 3.0, 9.0], None, [0.0, 3.0, 4.0, 5.0, float("inf")]]
    found = loss_bands([losses, losses[:1]])
    assert found is not None
    assert found.rounds.tolist() == [1.0, 3.0]
    assert found.middle.tolist() == [2.0, 4.0]
    assert (found.low[1], found.high[1]) == (3.0, 5.0)
    assert loss_bands([[None, None], [None]]) is None
    # A thousand rounds come to a hundred points, each the mean of ten rounds.
    many = loss_bands([[[0.0, r, r, r, r] for r in range(1, 1001)]])
    assert many is not None
    assert many.rounds.tolist() == many.middle.tolist() == [5.5 + 10 * i for i in range(100)]


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
