"""``fedzmg compare --track``: every round of every run, as ``run`` and ``study`` show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedzmg import trackers
from fedzmg.cli import app
from fedzmg.errors import InputError
from fedzmg.trackers import Ending, TrackedRun, TrackerInfo

COMPARE = ["compare", "quadratic", "--algorithms", "fedzmg,fedavg", "--seeds", "2", "--rounds", "2",
           "--engine", "vectorized"]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_run_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, list[int | str]] = {}

    class Told:
        def start(self, run: TrackedRun) -> None:
            self.own = told.setdefault(run.name, [])
            assert run.directory == Path("c/tracking/told")

        def log(self, step: int, values: Mapping[str, float]) -> None:
            assert values["eval/loss"] >= 0
            self.own.append(step)

        def finish(self, ending: Ending) -> None:
            self.own.append(ending)

    # Curves take longer to draw than to train.
    monkeypatch.setattr("fedzmg.report.figures.save", lambda figure, stem: (stem, stem))
    monkeypatch.setitem(trackers.TRACKERS, "told", TrackerInfo(Told, ()))
    done = CliRunner().invoke(app, [*COMPARE, "--out", "c", "--track", "told"])
    assert done.exit_code == 0, done.output
    names = [f"{name}/seed-{seed}" for name in ("fedzmg", "fedavg") for seed in (0, 1)]
    assert told == {name: [1, 2, "finished"] for name in names}


def test_an_unknown_tracker_is_refused_before_the_work(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*COMPARE, "--track", "tensorbord"])
    assert isinstance(done.exception, InputError)
    assert "did you mean 'tensorboard'?" in str(done.exception)
    assert list(tmp_path.iterdir()) == []
