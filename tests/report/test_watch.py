"""Progress that ``fedzmg watch`` reads: every stage, partial lines, all kinds of locks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fedzmg
from fedzmg.cli import app
from fedzmg.errors import InputError
from fedzmg.experiment.progress import Silent
from fedzmg.results.watch import Watch, Work
from fedzmg.simulation import RoundReport
from fedzmg.storage.checkpoint import StoredCheckpoint, bound_to, write_checkpoint
from fedzmg.storage.formats import append_log
from fedzmg.storage.lock import NAME as LOCK
from fedzmg.storage.lock import Owner
from fedzmg.terminal import inspection

Write = Callable[..., Path]


class Stop(Silent):
    """A crash after some round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def advance(self, report: RoundReport) -> None:
        if report.round == self.after:
            raise MemoryError


def held(place: Path, **changes: Any) -> None:
    """As if this process were at work there."""
    owner = replace(Owner.of_this_process(), **changes)
    (place / LOCK).write_text(json.dumps(asdict(owner)))


def only(place: Path) -> Work:
    [work] = Watch(place).look()
    return work


def shown(works: list[Work]) -> str:
    console = Console(width=100, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(inspection.screen(works, 100))
    return capture.get()


def states(work: Work) -> list[str]:
    return [one.state for one in work.trainings]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    place = tmp_path / "study"
    place.mkdir()
    (place / "study.toml").write_text(
        'kind = "study"\ntask = "digits"\nrounds = 10\nseeds = [0, 1]\n\n'
        '[algorithms.fedzmg]\n\n[algorithms."with clip"]\nalgorithm = "fedavg"\n'
    )
    return place


def test_study_at_work(planned: Path, write_run: Write) -> None:
    write_run("study/fedzmg/seed-0", "fedzmg", 0, [0.2] * 10)
    write_run("study/fedzmg/seed-1", "fedzmg", 1, [0.2] * 9 + [0.5])
    at_work = write_run("study/with-clip/seed-0", "fedavg", 0, [0.1, 0.9, 0.7], rounds=10)
    held(planned)
    assert only(at_work).alive  # a run of a study is held by it
    held(at_work)
    work = only(planned)
    assert states(work) == ["done", "done", "running", "waiting"]
    assert [one.round for one in work.trainings] == [10, 10, 3, 0]
    # 7 + 10 rounds of half a second are to come; one pack of one run does two rounds a second.
    assert work.seconds_left == pytest.approx(8.5)
    assert work.rate == pytest.approx(2.0)
    assert work.best is not None
    assert (work.best.name, work.best.metric) == ("with clip/seed-0", 0.7)
    assert (work.alive, work.complete) == (True, False)
    text = inspection.line(work)
    for part in ("2 done, 1 running, 1 waiting", "round 3 of 10", "about 8 s left", "70.00 %"):
        assert part in text
    json.dumps(work.as_dict(), allow_nan=False)


def test_interrupted_and_diverged_and_stopped(
    planned: Path, write_run: Write, log_line: Callable[..., dict[str, Any]]
) -> None:
    write_run("study/fedzmg/seed-0", "fedzmg", 0, [0.2] * 4, rounds=10)
    lines = [log_line(1, 0.1), log_line(2, "nan", diverged=True, loss="inf")]
    write_run("study/fedzmg/seed-1", "fedzmg", 1, [], lines=lines, rounds=10)
    early = write_run("study/with-clip/seed-0", "fedavg", 0, [0.1, 0.9, 0.7], rounds=10)
    why = {"format": 1, "round": 3, "why": "halving", "words": "too slow"}
    (early / "stopped.json").write_text(json.dumps(why))
    work = only(planned)
    assert states(work) == ["interrupted", "diverged", "stopped", "waiting"]
    assert [one.ended for one in work.trainings] == [False, False, True, False]
    assert work.trainings[2].why == "too slow"
    assert work.owner is None
    assert "nobody is at work" in inspection.line(work)
    json.dumps(work.as_dict(), allow_nan=False)  # what is not finite is null
    # A process that is gone leaves its lock behind.
    held(planned, pid=2**22 + 1)
    assert (only(planned).alive, states(only(planned))[0]) == (False, "interrupted")
    assert "which is gone" in shown([only(planned)])
    # One of another machine is believed for a while.
    held(planned, host="elsewhere", machine="")
    assert only(planned).alive


def test_lone_run_and_several_together(tmp_path: Path, write_run: Write) -> None:
    write_run("a", "fedzmg", 0, [0.2] * 4)
    write_run("b/inner", "fedavg", 3, [0.2] * 4, rounds=8)
    works = Watch(tmp_path).look()
    assert [(work.kind, work.complete) for work in works] == [("run", True), ("run", False)]
    assert only(tmp_path / "a").trainings[0].name == "fedzmg/seed-0"
    assert "interrupted" in shown(works)


def test_a_comparison_is_known_by_its_plan(tmp_path: Path) -> None:
    """It is written before the first round, so that every run to come is named."""
    names = ["fedzmg", "fedadam:reddi"]
    task, place = fedzmg.tasks.get("quadratic"), tmp_path / "c"
    with pytest.raises(MemoryError):
        fedzmg.compare(task, names, seeds=2, rounds=4, out=place, progress=Stop(1))
    work = only(place)
    assert (work.kind, work.task, work.complete) == ("study", "quadratic", False)
    assert [one.name for one in work.trainings] == [f"{n}/seed-{s}" for n in names for s in (0, 1)]
    assert states(work) == ["interrupted"] * 2 + ["waiting"] * 2
    assert Watch(place).unfinished() == [f"the study {place} is not finished"]


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    place = tmp_path / "grid"
    (place / "fedavg").mkdir(parents=True)
    (place / "grid.toml").write_text(
        'kind = "grid"\ntask = "digits"\nrounds = 6\nlast = 2\nseeds = [7]\ntogether = 2\n\n'
        "[algorithms.fedavg]\n\n[algorithms.fedzmg]\n\n[axes]\n"
        '"client.lr" = [0.1, 1.0]\n"server.lr" = [0.5, 1.0]\n"client.mu" = [1.0]\n'
    )
    return place


def write_rows(place: Path, rows: list[dict[str, Any]]) -> None:
    usual = {"seed": 7, "loss": 1.0, "train_loss": 1.0, "diverged": False, "seconds": 0.5}
    with (place / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({**usual, **row}) + "\n" for row in rows)


def test_grid_at_work(grid: Path) -> None:
    place = grid / "fedavg"
    write_rows(place, [{"trial": t, "round": 1, "metric": 0.9} for t in (0, 1)])
    write_rows(place, [{"trial": 0, "round": r, "metric": m} for r, m in ((5, 0.4), (6, 0.6))])
    write_rows(place, [{"trial": 1, "round": r, "metric": 0.0, "diverged": True} for r in (5, 6)])
    write_rows(place, [{"trial": 2, "round": 1, "metric": 0.45}])
    stop = {"trial": 3, "round": 0, "why": "halving", "words": "worse"}
    (place / "stopped.jsonl").write_text(json.dumps(stop) + "\n")
    stored = StoredCheckpoint(3, 0, {2: {"w": torch.zeros(1)}}, {}, {})
    binding = bound_to(grid / "grid.toml", [2, 3])
    write_checkpoint(place / "checkpoint.safetensors", stored, binding)
    held(grid)
    work = only(grid)
    # Neither algorithm has the option client.mu; each has 2 x 2 points.
    assert len(work.trainings) == 8
    assert states(work) == ["done", "diverged", "running", "stopped", *["waiting"] * 4]
    # Between evaluations only the checkpoint tells how far a trial is.
    assert [one.round for one in work.trainings] == [6, 6, 3, 3, 0, 0, 0, 0]
    assert work.best is not None
    # The mean over the rounds that score, and not the first look.
    assert (work.best.name, work.best.metric) == ("fedavg client.lr=0.1 server.lr=0.5 seed=7", 0.5)


def test_nothing_there_and_just_begun(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a directory"):
        Watch(tmp_path / "x").look()
    with pytest.raises(InputError, match="holds no run"):
        Watch(tmp_path).look()
    held(tmp_path)
    assert only(tmp_path).kind == "starting"
    assert not only(tmp_path).complete


class Waits(Exception):
    """Raised where the command would wait for its next look."""


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise Waits

    monkeypatch.setattr("time.sleep", wait)


def watch(place: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["watch", str(place), *more], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("lock", [None, {"pid": 2**22 + 1}])
def test_watch_ends_where_nobody_is_at_work(
    planned: Path, write_run: Write, lock: dict[str, Any] | None
) -> None:
    made = {"command": "fedzmg study my.toml --out study"}
    write_run("study/fedzmg/seed-0", "fedzmg", 0, [0.2, 0.4], rounds=10, manifest=made)
    if lock is not None:
        held(planned, **lock)
    done = watch(planned)
    assert done.exit_code == 0, done.output
    assert "1 interrupted, 3 waiting, round 0 to 2 of 10, best accuracy 40.00 %" in done.stdout
    again = "nobody is at work: run the same command again to continue: fedzmg study my.toml --out"
    assert again in done.stdout
    assert json.loads(watch(planned, "--json").stdout)["works"][0]["command"] == made["command"]
    for arguments in (["--wait"], ["--wait", "--json"]):
        assert isinstance(watch(planned, *arguments).exception, Waits)
    held(planned)
    assert isinstance(watch(planned.parent).exception, Waits)


def test_what_moves_comes_first_in_a_terminal(planned: Path, write_run: Write) -> None:
    write_run("study/fedzmg/seed-0", "fedzmg", 0, [0.2] * 10)
    held(planned)
    held(write_run("study/with-clip/seed-0", "fedavg", 0, [0.1, 0.9, 0.7], rounds=10))
    lines = shown(Watch(planned).look()).splitlines()
    [first] = [i for i, line in enumerate(lines) if line.startswith("run ")]
    assert [line.split()[0] for line in lines[first + 2 : first + 4]] == ["with", "fedzmg/seed-0"]
    assert any("best accuracy" in line for line in lines[:first])


@pytest.mark.usefixtures("no_waiting")
def test_variants_are_called_by_their_labels(tmp_path: Path, write_run: Write, grid: Path) -> None:
    place = tmp_path / "study"
    place.mkdir()
    (place / "study.toml").write_text(
        'kind = "study"\ntask = "digits"\nrounds = 2\nseeds = [0]\n\n'
        '[algorithms.average-plain]\nalgorithm = "fedzmg"\nlabel = "average: plain [sgd]"\n'
        "[algorithms.fedavg]\n"
    )
    write_run("study/average-plain/seed-0", "fedzmg", 0, [0.2, 0.5])
    text = watch(place, "--once").stdout
    assert "average: plain [sgd]/seed-0" in text
    assert "average-plain" not in text
    assert "fedavg/seed-0" in text
    # For programs, names are those of directories.
    [work] = json.loads(watch(place, "--json").stdout)["works"]
    assert work["best"] == "average-plain/seed-0"
    assert [one["group"] for one in work["trainings"]] == ["average-plain", "fedavg"]
    plan = grid / "grid.toml"
    plan.write_text(plan.read_text().replace(".fedavg]", '.fedavg]\nlabel = "the average"'))
    write_rows(grid / "fedavg", [{"trial": 0, "round": 6, "metric": 0.5}])
    text = watch(grid, "--once").stdout
    assert "the average" in text
    assert "client.lr=0.1 server.lr=0.5 seed=7" in text
    assert "fedavg" not in text


def test_a_growing_log_is_read_anew(planned: Path, write_run: Write) -> None:
    path = write_run("study/fedzmg/seed-0", "fedzmg", 0, [0.2] * 2, rounds=10) / "metrics.jsonl"
    looks, rounds = Watch(planned), []
    for part in ('{"round": 3, "metr', "\n", '{"round": 3, "metric": 0.7}\n'):
        with path.open("a") as file:
            file.write(part)
        rounds.append(looks.look()[0].trainings[0].round)
    assert rounds == [2, 2, 3]
    append_log(path, [{"round": 3, "metric": 0.8}])
    assert looks.look()[0].trainings[0].metric == 0.8
    path.write_text("")
    assert looks.look()[0].trainings[0].round == 0
    for line in ('{"round": "x"}', '{"round": 1, "metric": "high"}'):
        path.write_text(f'{line}\n{{"round": 2}}\n')
        with pytest.raises(InputError, match="line 1"):
            looks.look()
