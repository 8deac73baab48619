"""What is loaded before a command is known, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def start(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As if torch were what is in a directory."""
    known = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "fedzmg", *words],
        env={**os.environ, "PYTHONPATH": known}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_help_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is loaded')")
    done = start(tmp_path, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert start(tmp_path, "list").stderr == "torch is loaded\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_while_torch_loads_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = start(tmp_path, "list")
    assert done.returncode == 130
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.strip().startswith("fedzmg: interrupted before anything was done")
