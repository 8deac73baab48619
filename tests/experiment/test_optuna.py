"""Searches whose points Optuna proposes: the same points again, resumed, pruned and elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedzmg import InputError, Task, tune
from fedzmg.api import search_spec
from fedzmg.experiment.grids.grid import run_grid
from fedzmg.experiment.progress import Silent
from fedzmg.simulation import RoundReport

AXES = {"client.lr": np.geomspace(1e-4, 100, 25), "server.lr": np.geomspace(0.01, 10, 13)}


def pets() -> Task:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return Task.from_arrays(
        nn.Linear(4, 3), x[:30], y[:30], np.arange(30) % 5, test=(x[30:60], y[30:60]),
        tune=(x[60:], y[60:]), name="pets", cohort=3, batch_size=4, rounds=4,
    )  # fmt: skip


class Press(Silent):
    """A user who presses Ctrl-C in the second batch."""

    rounds = 0

    def advance(self, report: RoundReport) -> None:
        self.rounds += 1
        if self.rounds == 6:
            signal.raise_signal(signal.SIGINT)


def searched(out: Path, **more: Any) -> dict[str, Any]:
    how = {"method": "optuna", "budget": 10, "batch": 4, **more}
    progress = how.pop("progress", None)
    spec = search_spec(pets(), {"fedavg": {}}, AXES, 2, {}, last=2, search=how, engine="vectorized")
    return run_grid(spec, out, task=pets(), progress=progress)["algorithms"]["fedavg"]


def test_search_continues_with_the_same_points(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    whole = searched(tmp_path / "whole")
    assert len(whole["points"]) == 10
    assert whole["best"]["score"] == max(point["score"] for point in whole["points"])
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "cut", progress=Press())
    assert searched(tmp_path / "cut") == whole
    logs = [(tmp_path / n / "fedavg" / "proposed.jsonl").read_bytes() for n in ("whole", "cut")]
    assert logs[0] == logs[1]
    lines = [(tmp_path / n / "fedavg" / "metrics.jsonl").read_text() for n in ("whole", "cut")]
    assert lines[0].count("\n") == lines[1].count("\n")


def test_stopping_rules_prune(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pruned = searched(tmp_path, halving=[[2, 1]])
    assert pruned["stopped"]["halving"] == 2 * (3 + 3 + 1)
    assert len(pruned["points"]) == 10
    assert pruned["best"] is not None


def test_small_grid_is_tried_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    found = tune(
        pets(), "fedavg", {"client.lr": [0.01, 0.1, 1]}, search="optuna", engine="sequential",
        rounds=1, out=tmp_path,
    )  # fmt: skip
    assert len(found.data["algorithms"]["fedavg"]["points"]) == 3
    assert "points" in str(found)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedzmg.experiment.specs.files.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"fedzmg\[optuna\]"):
        tune(pets(), "fedavg", {"client.lr": [0.1]}, search="optuna")
