"""``watch``, ``diff``, ``verify`` and ``--track`` as a user types them: exit codes and one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg import trackers
from fedzmg.cli import app
from fedzmg.trackers import Ending, TrackedRun, TrackerInfo

ENVIRONMENT = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
FILES = Path(__file__).parents[2] / "experiments"
STUDY = ["study", str(FILES / "digits-study.toml"), "--set", 'algorithms=["fedzmg"]',
         "--set", "seeds=[0]", "--set", "rounds=2", "--set", "protocol.cohort=2"]  # fmt: skip


def fedzmg(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Told:
    """A tracker that keeps what it is told in one place for all."""

    steps: list[int] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> None:
        assert run.name == "fedzmg/seed-0"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values["eval/accuracy"] >= 0
        self.steps.append(step)

    def finish(self, ending: Ending) -> None:
        assert ending == "finished"


def test_study_is_tracked_watched_compared_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "told", TrackerInfo(Told, ()))
    done = fedzmg(*STUDY, "--out", "s", "--track", "told")
    assert done.exit_code == 0, done.output
    assert Told.steps == [1, 2]

    seen = fedzmg("watch", "s")  # complete, so it ends by itself
    assert seen.exit_code == 0
    assert "1 done, round 2 of 2" in seen.stdout
    assert "fedzmg/seed-0" in fedzmg("watch", "s", "--once").stdout
    [work] = json.loads(fedzmg("watch", "s", "--json").stdout)["works"]
    assert (work["complete"], work["lock"]) == (True, None)

    shutil.copytree("s", "t")
    assert fedzmg("diff", "s", "t").exit_code == 0
    same = fedzmg("verify", "s", "--rounds", "1")
    assert same.exit_code == 0, same.output
    assert "bit for bit" in same.stdout

    log = Path("t/fedzmg/seed-0/metrics.jsonl")
    log.write_text(log.read_text().replace('"loss": ', '"loss": 1', 1))
    differ = fedzmg("diff", "s", "t")
    assert differ.exit_code == 1
    assert "they differ in curves" in differ.stdout
    assert fedzmg("diff", "s", "t", "--only", "spec,versions").exit_code == 0
    assert json.loads(fedzmg("diff", "s", "t", "--json").stdout)["equal"]["curves"] is False
    unlike = fedzmg("verify", "t", "--rounds", "1", "--json")
    assert unlike.exit_code == 1
    assert json.loads(unlike.stdout)["runs"][0]["first"] == 1


@pytest.mark.slow
def test_watch_follows_a_process_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedzmg"]
    longer = [*command, *STUDY, "--set", "rounds=30", "--out", "s"]
    with subprocess.Popen(longer, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "s").is_dir():
            time.sleep(0.1)
        text = subprocess.check_output(
            [*command, "watch", "s", "--every", "0.5"], env=ENVIRONMENT, text=True, timeout=300
        )
        assert process.wait(timeout=60) == 0
    lines = text.splitlines()
    assert len(lines) > 1
    assert "1 running" in text
    assert "1 done, round 30 of 30" in lines[-1]
