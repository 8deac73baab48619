"""Soak of disturbed commands: the tool itself, and a few of its tries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")
def test_disturbed_commands_give_the_undisturbed_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "soak.py"), "--tries", "20"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tries, 0 failures" in done.stdout
