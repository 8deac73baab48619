"""Grids and studies as a user types them, in real processes where signals and exit codes matter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.cli.output import UNFINISHED
from fedzmg.errors import InputError
from fedzmg.report.figures import draw, rendered
from fedzmg.results.reading import read

ENVIRONMENT = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
FILES = Path(__file__).parents[2] / "experiments"
QUICK = ["--set", "rounds=1", "--set", 'algorithms=["fedzmg"]']


def fedzmg(*arguments: str) -> Any:
    """In this process, which has loaded everything already."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_grid_then_study_with_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = [*QUICK, "--set", "last=1", "--set", "axes.client.lr=[0.1]",
               "--set", "axes.server.lr=[0.5,1]"]  # fmt: skip
    done = fedzmg("grid", str(FILES / "digits-grid.toml"), *smaller)
    assert done.exit_code == 0, done.output
    place = tmp_path / "runs" / "digits-grid"
    assert (place / "heat-maps.png").read_bytes()[:4] == b"\x89PNG"
    assert (place / "fedzmg" / "heat-map.svg").exists()
    assert "best point" in done.output
    assert "fedzmg: the best point of fedzmg lies on the border (server.lr = " in done.stderr
    best = json.loads((place / "grid.json").read_text())["algorithms"]["fedzmg"]["best"]
    done = fedzmg(
        "study", str(FILES / "digits-study.toml"), *QUICK, "--json", "--out", "s",
        "--set", "rates=runs/digits-grid", "--set", "seeds=[0]", "--set", "thresholds=[0.3,0.45]",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["algorithms"]["fedzmg"]["options"]["server.lr"] == best["options"]["server.lr"]
    assert (tmp_path / "s" / "curves.png").exists()
    figure = (tmp_path / "s" / "curves.svg").read_text()
    assert re.findall(r">(threshold .*?)<", figure) == ["threshold 30 %", "threshold 45 %"]
    assert (tmp_path / "s" / "fedzmg" / "seed-0" / "spec.toml").exists()
    # A report draws the same figures from the kept files.
    charts = draw(read([place]), [])
    for kept, stem in (("heat-maps", "grid-heat-maps"), ("fedzmg/heat-map", "grid-fedzmg")):
        assert rendered(charts[stem], "svg") == (place / f"{kept}.svg").read_bytes()


def test_validate_says_what_it_costs_and_writes_nothing(tmp_path: Path) -> None:
    done = fedzmg("validate", str(FILES / "digits-grid.toml"))
    assert done.exit_code == 0, done.output
    for word in ("trials       18", "72 in all", "local steps", "down", "disk", "about"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_validate_says_that_the_grid_has_to_come_first(tmp_path: Path) -> None:
    command = ["validate", str(FILES / "digits-study.toml"), "--set", "rates=first", *QUICK]
    place = tmp_path / "first"
    begun: dict[str, Any] = {"format": 1, "complete": False, "algorithms": {}}
    begun |= {"task": "digits", "selection": "tune"}
    for content in (None, begun):
        if content is not None:
            place.mkdir()
            (place / "grid.json").write_text(json.dumps(content))
        done = fedzmg(*command)
        assert done.exit_code == 0, done.output
        assert done.stderr.startswith("fedzmg: rates = 'first': ")
        assert "run the grid first" in done.stderr
        assert "trials" in done.stdout
    # What the study would refuse is refused here, too.
    other = {"format": 1, "complete": True, "algorithms": {}, "task": "plays"}
    (place / "grid.json").write_text(json.dumps(other))
    assert "chose rates for 'plays', not for 'digits'" in str(fedzmg(*command).exception)


def test_a_remark_names_the_file_and_what_was_set() -> None:
    file = str(FILES / "digits-study.toml")
    done = fedzmg("validate", file, "--set", "eval_every=9", "--set", "rates=given", *QUICK)
    assert done.exit_code == 0, done.output
    assert f"fedzmg: {file}: eval_every = 9 is more than rounds = " in done.stderr
    done = fedzmg("validate", file, "--set", "protocol.cohort=161")
    assert str(done.exception).startswith(f"{file} --set protocol.cohort=161: cohort = 161 but ")


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        ("grid", 'kind = "study"\n', "is a study: use 'fedzmg study"),
        ("grid", 'task = "digits"\nalgorithms = ["fedzmg"]\nlsat = 3\n', "did you mean 'last'?"),
        ("study", 'task = "digits"\nalgorithms = ["fedzgm"]\n', "did you mean 'fedzmg'?"),
        ("study", 'task = "digits"\nalgorithms = ["fedzmg"]\nrates = "x"\n', "finished grid"),
        (
            "study",
            'task = "cifar100"\nalgorithms = ["fedzmg"]\nrates = "x"\nrates_by = "test"\n',
            'rates_by = "test": cifar100 would report on some of the examples that chose its '
            'rates, as if they had not: say preset.selection = "test" as well',
        ),
        ("validate", 'kind = "grid"\ntask = "digits"\n', "algorithms is missing"),
        (
            "validate",
            'kind = "study"\ntask = "digits"\nalgorithms = ["fedzmg"]\nthresholds = [80]\n',
            "f.toml: thresholds = 80: an accuracy is a share",
        ),
        (
            "grid",
            'task = "digits"\nalgorithms = ["fedzmg"]\n[protocol]\ncohort = 161\n',
            "f.toml: cohort = 161 but there are 160 clients",
        ),
        (
            "run",
            'task = "digits"\n[protocol]\ncohort = "a"\n',
            "f.toml: cohort = 'a': expected a whole number",
        ),
        ("validate", 'task = "digits"\nalgorithm = "fedagv"\n', "did you mean 'fedavg'?"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, command: str, content: str, message: str) -> None:
    (tmp_path / "f.toml").write_text(content)
    done = fedzmg(command, "f.toml")
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["f.toml"]


def test_time_that_is_over_is_an_exit_code_and_the_same_command_goes_on() -> None:
    command = [
        "study", str(FILES / "digits-study.toml"), "--set", "seeds=[0]", "--set", "rounds=3",
        "--set", 'algorithms=["fedzmg"]',
    ]  # fmt: skip
    done = fedzmg(*command, "--max-minutes", "1e-9")
    assert done.exit_code == UNFINISHED
    assert "time is up after round 1 of 3; nothing is lost" in done.output
    assert fedzmg(*command).exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_killed_grid_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    """``kill -9`` again and again, at moments of no one's choosing."""
    command = [sys.executable, "-m", "fedzmg", "grid", str(FILES / "digits-grid.toml"), "--json"]

    def run(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=ENVIRONMENT,
        )  # fmt: skip

    whole = json.loads(run("--out", "whole").communicate(timeout=300)[0])
    for seconds in (3.0, 4.0, 5.0, 6.5):
        process = run("--out", "killed")
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = json.loads(run("--out", "killed").communicate(timeout=300)[0])
    assert found["algorithms"] == whole["algorithms"]
