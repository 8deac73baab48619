"""The same directories give the same bytes, whoever asks, wherever and whenever."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app

STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory."""
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("files", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_process_place_and_day_give_the_same_bytes(
    write_run: Any, grid: dict[str, Any], tmp_path: Path, files: bool
) -> None:
    for name in ("fedzmg", "fedavg"):
        for seed in range(2):
            tops = [0.1 * seed, 0.5, 0.5, 0.5, 0.6]
            write_run(f"study/{name}/seed-{seed}", name, seed, tops, task="mnist-by-writer")
    here, arguments = tmp_path / "here", ["report", str(tmp_path / "study")]
    if files:
        (tmp_path / "grid").mkdir()
        (tmp_path / "grid" / "grid.json").write_text(json.dumps(grid))
        arguments.append(str(tmp_path / "grid"))
    else:
        arguments.append("--page-only")
    done = CliRunner().invoke(app, [*arguments, "--out", str(here)])
    assert done.exit_code == 0, done.output
    found = hashes(here)
    stems = ("curves", "differences", "traffic", "seeds", "grid-fedzmg", "grid-heat-maps")
    assert {name for name in found if name.startswith("figures/")} == {
        f"figures/{stem}.{suffix}" for stem in stems for suffix in STARTS if files
    }
    for suffix, start in STARTS.items() if files else ():
        assert (here / "figures" / f"seeds.{suffix}").read_bytes().startswith(start)

    # Other hashes of strings, another day, another cache of fonts, and somebody's own taste.
    settings = tmp_path / "settings"
    settings.mkdir()
    (settings / "matplotlibrc").write_text("axes.titlesize: 30\nlines.linewidth: 9\n")
    away = tmp_path / "away"
    away.mkdir()
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "SOURCE_DATE_EPOCH": "86400",
        "TZ": "Asia/Tokyo",
        "MPLCONFIGDIR": str(settings),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    # A figure needs no window, and so nothing that may open one.
    program = (
        "import sys\nfrom fedzmg.cli import main\ntry:\n    main()\n"
        "finally:\n    assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program, *arguments, "--out", "there"],
        cwd=away, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert hashes(away / "there") == found
