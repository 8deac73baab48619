"""The command line as a user types it, in real processes where signals and exit codes matter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedzmg.cli import _said_once, main

ENVIRONMENT = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STUDIES = Path(__file__).parents[2] / "experiments"
QUICK = ["--rounds", "3", "--engine", "vectorized"]


def fedzmg(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedzmg", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
        check=False,
    )


def test_compare_shows_table_figure_and_place(tmp_path: Path) -> None:
    done = fedzmg("compare", "--seeds", "2", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "fedzmg",
        "fedavg",
        "fedadam",
        "final accuracy",
        "to 80 %",
        "d_z",
        "MiB ↓ / ↑",
    ):
        assert text in done.stdout
    [place] = (tmp_path / "runs").iterdir()
    assert (place / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (place / "curves.svg").read_text()
    data = json.loads((place / "comparison.json").read_text())
    assert [row["algorithm"] for row in data["algorithms"]] == ["fedzmg", "fedavg", "fedadam"]
    again = fedzmg("compare", "--seeds", "2", *QUICK, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["algorithms"] == data["algorithms"]
    assert "complete already" in again.stderr
    fewer = fedzmg("compare", "--algorithms", "fedavg", "--out", str(place), cwd=tmp_path)
    assert fewer.returncode == 2
    assert "holds a comparison that also has fedzmg, fedadam" in fewer.stderr
    assert json.loads((place / "comparison.json").read_text()) == data


def test_a_suggestion_is_made_once() -> None:
    assert _said_once("No such command 'lst'. Did you mean 'list'? Did you mean 'list'?") == (
        "No such command 'lst'. Did you mean 'list'?"
    )


def test_run_writes_a_run_directory_and_exports(tmp_path: Path) -> None:
    done = fedzmg("run", "digits", "--algorithm", "fedzmg", "--set", "client.lr=0.05",
                  "--set", "protocol.cohort=3", *QUICK, "--json", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    place = tmp_path / summary["directory"]
    spec = (place / "spec.toml").read_text()
    assert "lr = 0.05" in spec
    assert "cohort = 3" in spec
    exported = fedzmg("export", str(place), cwd=tmp_path)
    assert exported.stdout.strip().endswith("model.safetensors")
    from_file = fedzmg("run", str(place / "spec.toml"), "--json", "--out", "copy", cwd=tmp_path)
    assert json.loads(from_file.stdout)["loss"] == summary["loss"]


def test_list_and_version(tmp_path: Path) -> None:
    shown = fedzmg("list", cwd=tmp_path).stdout
    listed = json.loads(fedzmg("list", "--json", cwd=tmp_path).stdout)
    options = {o["key"]: o["default"] for o in listed["algorithms"]["fedzmg"]["options"]}
    assert options["client.momentum"] == 0.9
    for name in [*listed["algorithms"], *listed["tasks"]]:
        assert name in shown
    assert fedzmg("--version", cwd=tmp_path).stdout.startswith("fedzmg 0.")


def test_definition_card_shows_equations_options_and_costs(tmp_path: Path) -> None:
    shown = fedzmg("list", "fedadam", "--task", "digits", cwd=tmp_path).stdout
    for text in ("sqrt(1 - beta2^t)", "server.beta2", "[0, 1)", "0.99", "204.2 KiB", "408.3 KiB"):
        assert text in shown
    data = json.loads(fedzmg("list", "fedadam", "--json", cwd=tmp_path).stdout)
    assert data["costs"] == {"down": 1, "up": 1, "client_keeps": 0, "server_keeps": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "fedadm"], "did you mean 'fedadam'?"),
        (["run", "digitz"], "unknown task 'digitz': did you mean 'digits'?"),
        (["run", "digits", "--algorithm", "fedavgg"], "did you mean 'fedavg'?"),
        (["run", "digits", "--set", "client.lrr=1"], "did you mean 'client.lr'?"),
        (["run", "digits", "--set", "client.lr=0"], "lr = 0: expected a finite number > 0"),
        (["run", "digits", "--set", "client.lr"], "expected KEY=VALUE"),
        (["run", "digits", "--set", "cohort=3"], "did you mean 'protocol.cohort'?"),
        (["run", "digits", "--set", "protocol.cohort=161"], "there are 160 clients"),
        (["run", "cifar100", "--set", "preset.centring=imag"], "expected none or image"),
        (["run", "digits", "--roundz", "3"], "No such option"),
        (["run", "digits", "--rounds", "x"], "'x' is not a valid int"),
        (["run", "digits", "--device", "tpu"], "device = 'tpu'"),
        (["run", "no.toml"], "cannot read no.toml"),
        (["run", f"{STUDIES}/digits-study.toml"], "is a study: use 'fedzmg study"),
        (["comprae"], "No such command 'comprae'"),
        (["compare", "--algorithms", "fedzmg,fedadm"], "did you mean 'fedadam'?"),
        (["compare", "--seeds", "0"], "0 is not in the range"),
        (["compare", "--out", "file/below"], "cannot write the run directory"),
        (["export", "nothing"], "nothing is no directory: give a run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: a new one would take seconds to start, for each of these lines."""
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedzmg", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    error = capsys.readouterr().err
    assert left.value.code == 2, error
    assert message in error
    assert len(error.strip().splitlines()) == 1, error
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_exit_code_of_a_real_process(tmp_path: Path) -> None:
    done = fedzmg("run", "digitz", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fedzmg: error: unknown task 'digitz'")


def test_half_written_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "metrics.jsonl").write_text("")
    done = fedzmg("run", "digits", "--out", "half", *QUICK, cwd=tmp_path)
    assert done.returncode == 2
    assert "not a whole run directory" in done.stderr
    assert [p.name for p in (tmp_path / "half").iterdir()] == ["metrics.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_keeps_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedzmg", "run", "digits", "--rounds", "4000", "--out", "r",
               "--engine", "vectorized"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, env=ENVIRONMENT,
    )  # fmt: skip
    log = tmp_path / "r" / "metrics.jsonl"
    for _ in range(600):
        if log.exists() and log.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing is lost, run the same command again to go on" in said
    done = [json.loads(line)["round"] for line in log.read_text().splitlines()]
    assert done == list(range(1, len(done) + 1))
    from fedzmg.experiment.runs.store import RunDirectory

    kept = RunDirectory(tmp_path / "r").checkpoint()
    assert kept is not None
    assert kept.round in (len(done), len(done) - 1)
