"""What ``fedzmg watch`` makes of a comparison, which has no file that says so until its end."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedzmg.cli import app
from fedzmg.cli.training import compare
from fedzmg.results.watch import Watch, unfinished
from fedzmg.results.work_places import USUALLY_COMPARED, asked_algorithms
from fedzmg.storage.lock import NAME as LOCK
from fedzmg.storage.lock import Owner

Write = Callable[..., Path]
MADE = {"command": "fedzmg compare digits --rounds 4 --seeds 2 --algorithms fedzmg,fedadam:reddi"}


def names_and_states(place: Path) -> list[tuple[str, str]]:
    [work] = Watch(place).look()
    return [(one.name, one.state) for one in work.trainings]


@pytest.fixture
def begun(tmp_path: Path, write_run: Write) -> Path:
    for seed in range(2):
        write_run(f"c/fedzmg/seed-{seed}", "fedzmg", seed, [0.2] * 3, rounds=4, manifest=MADE)
    return tmp_path / "c"


def test_runs_of_a_comparison_are_one_work_with_what_is_still_to_come(begun: Path) -> None:
    (begun / "fedzmg" / "seed-0" / LOCK).write_text(json.dumps(asdict(Owner.of_this_process())))
    [work] = Watch(begun).look()
    assert (work.kind, work.task, work.alive, work.complete) == (
        "comparison",
        "digits",
        True,
        False,
    )
    assert names_and_states(begun) == [
        ("fedzmg/seed-0", "running"),
        ("fedzmg/seed-1", "waiting"),
        ("fedadam:reddi/seed-0", "waiting"),
        ("fedadam:reddi/seed-1", "waiting"),
    ]
    shown = CliRunner().invoke(app, ["watch", str(begun), "--once"]).stdout
    assert shown.count("best so far") == 1
    assert unfinished(begun) == [
        f"the comparison {begun} is not finished (0 of 4 trained) and runs now"
    ]


def test_what_was_made_in_python_is_known_by_its_runs(tmp_path: Path, write_run: Write) -> None:
    for name, folder in (("fedadam:reddi", "fedadam-reddi"), ("fedavg", "fedavg")):
        write_run(f"c/{folder}/seed-5", name, 5, [0.2] * 4)
    [work] = Watch(tmp_path).look()
    assert (work.place, work.kind, work.complete) == (str(tmp_path / "c"), "comparison", True)
    assert [one.name for one in work.trainings] == ["fedadam:reddi/seed-5", "fedavg/seed-5"]


def test_runs_by_other_protocols_are_none_of_it(begun: Path, write_run: Write) -> None:
    write_run("c/fedavg/seed-0", "fedavg", 0, [0.2] * 8)
    write_run("c/fedavg/by-hand", "fedavg", 1, [0.2] * 4)
    kinds = [(work.kind, len(work.trainings)) for work in Watch(begun).look()]
    assert kinds == [("run", 1), ("comparison", 1), ("comparison", 4)]


def test_part_of_a_comparison_is_looked_at_by_itself(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(begun / "fedzmg")
    assert len(names_and_states(Path())) == 2
    assert names_and_states(Path("seed-0")) == [("fedzmg/seed-0", "interrupted")]


def test_between_two_algorithms_a_command_is_still_at_work(begun: Path) -> None:
    lock = begun / "fedzmg" / "seed-0" / LOCK
    looks = Watch(begun)
    lock.write_text(json.dumps(asdict(Owner.of_this_process())))
    assert looks.look()[0].alive
    lock.unlink()
    assert looks.look()[0].alive
    lock.write_text(json.dumps(asdict(replace(Owner.of_this_process(), pid=2**22 + 1))))
    assert not looks.look()[0].alive


def test_the_usual_algorithms_are_those_of_the_command() -> None:
    assert inspect.signature(compare).parameters["algorithms"].default == USUALLY_COMPARED
    assert asked_algorithms("fedzmg compare digits") == USUALLY_COMPARED.split(",")
    assert asked_algorithms("fedzmg compare --algorithms=fedavg") == ["fedavg"]
    assert len(asked_algorithms("fedzmg compare digits --algorithms all")) > 20
    assert asked_algorithms("fedzmg run digits") == []
    assert asked_algorithms("an 'unclosed quote") == []
    assert asked_algorithms("") == []


@pytest.mark.slow
def test_a_real_comparison_is_one_work_from_its_first_round(tmp_path: Path) -> None:
    place = tmp_path / "real"
    words = ["compare", "digits", "--rounds", "400", "--seeds", "2", "--out", str(place)]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "fedzmg", *words], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and len(list(place.glob("*/*/metrics.jsonl"))) < 2:
            time.sleep(0.2)
        done = CliRunner().invoke(app, ["watch", str(place), "--once"], env={"COLUMNS": "100"})
        assert done.stdout.count("comparison of digits") == 1
        assert len(re.findall(r"/seed-\d +waiting", done.stdout)) == 4
        assert "complete" not in done.stdout
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
