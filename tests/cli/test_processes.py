"""Commands in processes of their own: killed, watched, and imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "experiments"
ENVIRONMENT = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
COMMAND = [sys.executable, "-m", "fedzmg"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT,
    )  # fmt: skip


def test_help_imports_no_heavy_library() -> None:
    heavy = {"torch", "h5py", "numpy", "fedzmg.data.catalog", "fedzmg.terminal.views"}
    code = f"import sys, fedzmg.cli; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_killed_grid_continues_to_the_same_numbers() -> None:
    """``kill -9`` several times, at arbitrary moments."""
    grid = ["grid", str(FILES / "digits-grid.toml"), "--json", "--out"]
    whole = json.loads(start(*grid, "whole").communicate(timeout=300)[0])
    for seconds in (3.0, 4.0, 5.0, 6.5):
        process = start(*grid, "killed")
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = json.loads(start(*grid, "killed").communicate(timeout=300)[0])
    assert found["algorithms"] == whole["algorithms"]


@pytest.mark.slow
def test_watch_follows_a_process_to_its_end(tmp_path: Path) -> None:
    study = ["study", str(FILES / "digits-study.toml"), "--set", 'algorithms=["fedzmg"]', "--set",
             "seeds=[0]", "--set", "rounds=30", "--set", "protocol.cohort=2"]  # fmt: skip
    with start(*study, "--out", "s") as process:
        while not list((tmp_path / "s").rglob("metrics.jsonl")):
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        with start("watch", "s", "--every", "0.5") as watching:
            assert watching.stdout is not None
            first = watching.stdout.readline()
            process.send_signal(signal.SIGCONT)
            text = first + watching.communicate(timeout=300)[0]
        process.communicate(timeout=60)
        assert process.returncode == 0
    lines = text.splitlines()
    assert len(lines) > 1
    assert "1 running" in text
    assert "1 done, round 30 of 30" in lines[-1]
