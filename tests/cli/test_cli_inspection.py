"""``watch``, ``diff``, ``verify`` and ``--track`` as a user types them: exit codes and one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedzmg import trackers
from fedzmg.trackers import Ending, TrackedRun, TrackerInfo

FILES = Path(__file__).parents[2] / "experiments"
STUDY = ["study", str(FILES / "digits-study.toml"), "--set", 'algorithms=["fedzmg"]',
         "--set", "seeds=[0]", "--set", "rounds=2", "--set", "protocol.cohort=2"]  # fmt: skip


class Recorder:
    """A tracker that keeps its steps in the class."""

    steps: list[int] = []  # noqa: RUF012

    def start(self, run: TrackedRun) -> None:
        assert run.name == "fedzmg/seed-0"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values["eval/accuracy"] >= 0
        self.steps.append(step)

    def finish(self, ending: Ending) -> None:
        assert ending == "finished"


def test_study_is_tracked_watched_compared_and_verified(
    fedzmg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "recorder", TrackerInfo(Recorder, ()))
    done = fedzmg(*STUDY, "--out", "s", "--track", "recorder")
    assert done.code == 0, done.err
    assert Recorder.steps == [1, 2]

    seen = fedzmg("watch", "s")  # complete, so it ends by itself
    assert seen.code == 0
    assert "1 done, round 2 of 2" in seen.out
    assert "fedzmg/seed-0" in fedzmg("watch", "s", "--once").out
    [work] = json.loads(fedzmg("watch", "s", "--json").out)["works"]
    assert (work["complete"], work["lock"]) == (True, None)

    shutil.copytree("s", "t")
    assert fedzmg("diff", "s", "t").code == 0
    same = fedzmg("verify", "s", "--rounds", "1")
    assert same.code == 0, same.err
    assert "bit for bit" in same.out

    log = Path("t/fedzmg/seed-0/metrics.jsonl")
    log.write_text(log.read_text().replace('"loss": ', '"loss": 1', 1))
    differ = fedzmg("diff", "s", "t")
    assert differ.code == 1
    assert "they differ in curves" in differ.out
    assert fedzmg("diff", "s", "t", "--only", "spec,versions").code == 0
    assert json.loads(fedzmg("diff", "s", "t", "--json").out)["equal"]["curves"] is False
    unlike = fedzmg("verify", "t", "--rounds", "1", "--json")
    assert unlike.code == 1
    assert json.loads(unlike.out)["runs"][0]["first"] == 1
