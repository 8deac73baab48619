"""The command line as a user types it: in this process, or in one of its own for signals.

A process of its own takes seconds to load libraries, which would be most of what these tests take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fedzmg.cli import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STUDIES = Path(__file__).parents[2] / "experiments"
QUICK = ["--rounds", "3", "--engine", "vectorized", "--set", "protocol.epochs=1",
         "--set", "protocol.cohort=3"]  # fmt: skip


class Done(NamedTuple):
    """Result of a command."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def fedzmg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command in an empty directory, as wide as a terminal that shows whole tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fedzmg", *arguments])
        capsys.readouterr()
        code: str | int | None = 0
        try:
            main()
        except SystemExit as left:
            code = left.code
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


def test_alone_it_says_what_to_type_first(fedzmg: Command) -> None:
    done = fedzmg()
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("fedzmg compare", "fedzmg list", "fedzmg --help"):
        assert words in done.stdout


def test_compare_shows_table_figure_and_place(tmp_path: Path, fedzmg: Command) -> None:
    done = fedzmg("compare", "--seeds", "2", *QUICK)
    assert done.returncode == 0, done.stderr
    for text in ("fedzmg", "fedavg:momentum", "fedadam", "final accuracy", "80 %", "d_z", "MiB"):
        assert text in done.stdout
    [place] = (tmp_path / "runs").iterdir()
    assert (place / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (place / "curves.svg").read_text()
    data = json.loads((place / "study.json").read_text())
    assert list(data["algorithms"]) == ["fedzmg", "fedavg", "fedavg:momentum", "fedadam"]
    plan = (place / "study.toml").read_bytes()
    again = fedzmg("compare", "--seeds", "2", *QUICK, "--json")
    assert json.loads(again.stdout)["algorithms"] == data["algorithms"]
    assert "complete already" in again.stderr
    fewer = fedzmg("compare", "--algorithms", "fedavg", "--out", str(place))
    assert fewer.returncode == 2
    assert "also has fedzmg, fedavg:momentum, fedadam" in fewer.stderr
    assert json.loads((place / "study.json").read_text()) == data
    assert (place / "study.toml").read_bytes() == plan


def test_run_writes_a_run_directory_and_exports(tmp_path: Path, fedzmg: Command) -> None:
    done = fedzmg("run", "digits", "--algorithm", "fedzmg", "--set", "client.lr=0.05",
                  *QUICK, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    place = tmp_path / summary["directory"]
    spec = (place / "spec.toml").read_text()
    assert "lr = 0.05" in spec
    assert "cohort = 3" in spec
    exported = fedzmg("export", str(place))
    assert exported.stdout.strip().endswith("model.safetensors")
    fedzmg("export", str(place), "--to", "new/folder/m.safetensors")
    assert (tmp_path / "new/folder/m.safetensors").is_file()
    from_file = fedzmg("run", str(place / "spec.toml"), "--json", "--out", "copy")
    assert json.loads(from_file.stdout)["loss"] == summary["loss"]


def test_lists_and_cards(fedzmg: Command) -> None:
    shown = fedzmg("list").stdout
    listed = json.loads(fedzmg("list", "--json").stdout)
    options = {o["key"]: o["default"] for o in listed["algorithms"]["fedzmg"]["options"]}
    assert options["client.momentum"] == 0.9
    for name in [*listed["algorithms"], *listed["tasks"]]:
        assert name in shown
    assert fedzmg("--version").stdout.startswith("fedzmg 0.")
    shown = fedzmg("list", "fedadam", "--task", "digits").stdout
    for text in ("sqrt(1 - beta2^t)", "server.beta2", "[0, 1)", "0.99", "204.2 KiB", "408.3 KiB"):
        assert text in shown
    data = json.loads(fedzmg("list", "fedadam", "--json").stdout)
    assert data["costs"] == {"down": 1, "up": 1, "client_keeps": 0, "server_keeps": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "fedadm"], "did you mean 'fedadam'?"),
        (
            ["run", "digitz"],
            "unknown task 'digitz': did you mean 'digits'? ('fedzmg list' shows all)",
        ),
        (["run", "xyzzy"], "unknown task 'xyzzy' ('fedzmg list' shows all)"),
        (["run", "digits", "--set", "lr=1"], "did you mean 'client.lr' or 'server.lr'?"),
        (["run", "digits", "--set", "protocol.threshold=80"], "0 to 1, 0.80 for 80 %"),
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
        (["compare", "--set", "fedprox.client.mu=1"], "fedprox.client.mu"),
        (["run", "digits", "--algorithm", "mfl", "--set", "server.lr=1"], "has no options"),
        (["compare", "--set", "fedavg.protocol.cohort=4"], "protocol.cohort"),
        (["compare", "--seeds", "0"], "0 is not in the range"),
        (["compare", "--algorithms", "fedavg", "--out", "file/below"], "file/below"),
        (["export", "nothing"], "nothing holds no spec.toml"),
        (["export", "."], ". holds no spec.toml"),
        (["run", "file"], "file is a file, not a task"),
        (["run", "digits", "--algorithm", "fedzmg,fedavg"], "a run has one; use 'fedzmg compare"),
        (["compare", "x.toml"], "compare takes a task, not a file; use 'fedzmg study x.toml'"),
        (["data", "get", "digits"], "'digits' ships with fedzmg: there is nothing to get"),
        (["compare", "--track", "tensorbord"], "did you mean 'tensorboard'?"),
        (["watch", "none"], "is not a directory"),
        (["watch", "."], "holds no run"),
        (["diff", ".", "."], "holds no run"),
        (["diff", ".", ".", "--only", "curve"], "did you mean 'curves'?"),
        (["verify", "."], "holds no run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, fedzmg: Command
) -> None:
    (tmp_path / "file").write_text("")
    done = fedzmg(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.lower().count("did you mean") <= 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full disk")
def test_a_full_disk_behind_the_output_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fedzmg", "list"],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300,
            env=ENVIRONMENT, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("fedzmg: error: the output: No space left on device; ")
    assert len(done.stderr.splitlines()) == 1


def test_runs_are_named_where_something_else_was_meant(tmp_path: Path, fedzmg: Command) -> None:
    place = tmp_path / "study" / "fedavg" / "seed-0"
    place.mkdir(parents=True)
    (place / "spec.toml").write_text('task = "digits"\n')
    done = fedzmg("export", "study")
    assert "study holds no spec.toml" in done.stderr
    assert done.stderr.endswith("study/fedavg/seed-0\n")
    done = fedzmg("run", "study/fedavg/seed-0")
    assert "'fedzmg run study/fedavg/seed-0/spec.toml --out study/fedavg/seed-0'" in done.stderr
    done = fedzmg("compare", "--out", "study", "--rounds", "1")
    assert "study is not empty and holds no study.toml" in done.stderr


def test_half_written_directory_is_refused_and_left_alone(tmp_path: Path, fedzmg: Command) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "metrics.jsonl").write_text("")
    done = fedzmg("run", "digits", "--out", "half", *QUICK)
    assert done.returncode == 2
    assert "holds no spec.toml" in done.stderr
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
    assert "nothing is lost, run the same command again" in said
    done = [json.loads(line)["round"] for line in log.read_text().splitlines()]
    assert done == list(range(1, len(done) + 1))
    from fedzmg.experiment.run_directory import RunDirectory

    kept = RunDirectory(tmp_path / "r").checkpoint()
    assert kept is not None
    assert kept.round in (len(done), len(done) - 1)
