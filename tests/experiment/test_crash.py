"""Crashes of real processes: kill -9, a full disk and power loss cost nothing but time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import Stop, same, toy

from fedzmg import Task
from fedzmg.errors import InputError
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import NEWEST
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import History

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and limits")


def task_of(rounds: int) -> Task:
    return toy(rounds=rounds, epochs=1, eval_every=5)


def spec(algorithm: str) -> RunSpec:
    return RunSpec(task="toy", algorithm=algorithm, engine="vectorized", device="cpu")


def lines(place: Path) -> int:
    log = place / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def command(place: Path, algorithm: str, rounds: int, limit: int | None = None) -> list[str]:
    code = "from fedzmg.cli import main; main()"
    if limit is not None:
        code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2); {code}"
    options = f"run digits --algorithm {algorithm} --rounds {rounds} --engine vectorized"
    return [sys.executable, "-c", code, *options.split(), "--device", "cpu", "--out", str(place)]


def environment(seconds: float) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "FEDZMG_CHECKPOINT_SECONDS": str(seconds)}


@posix
@pytest.mark.slow
def test_file_limit_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    """The system itself refuses the second half of a checkpoint of 210 kB."""
    place = tmp_path / "run"
    done = subprocess.run(
        command(place, "fedzmg", 2, limit=100_000), env=environment(0), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()
    assert len(last) == 1
    assert f"fedzmg: error: cannot write to {place}: " in last[0]
    assert "File too large" in last[0]
    assert {p.name for p in place.iterdir()} == {"spec.toml", "manifest.json", "metrics.jsonl"}
    assert lines(place) == 1


def no_room(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Room:
    """A disk that is full after some calls."""

    def __init__(self, function: Callable[..., Any], calls: int) -> None:
        self.function, self.left = function, calls

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        return self.function(*arguments) if self.left >= 0 else no_room()


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "last byte": lambda content: content[:-1],
    "zeros": lambda content: content[: len(content) // 2] + bytes(len(content) // 2),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    place = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(MemoryError):
        run_pack(task_of(8), [spec("scaffold")], [place], progress=Stop(5), checkpoint_seconds=0)
    return place, run_pack(task_of(8), [spec("scaffold")])[0]


FULL = [("fsync", c) for c in (0, 3, 12, 27)] + [("replace", c) for c in (1, 2, 6, 9)]
FULL += [("pwrite", c) for c in (0, 3, 40, 61)]
SOME = [("fsync", 12), ("replace", 6), ("pwrite", 40)]


@pytest.mark.parametrize(
    ("name", "calls"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.slow) for case in FULL],
)
def test_full_disk_at_any_moment_is_one_line(
    tmp_path: Path,
    stopped: tuple[Path, History],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    calls: int,
) -> None:
    task = task_of(8)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, Room(getattr(os, name), calls))
        with pytest.raises(InputError, match="No space left on device") as caught:
            run_pack(task, [spec("scaffold")], [tmp_path / "run"], checkpoint_seconds=0)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "lock.json").exists()
    [resumed] = run_pack(task, [spec("scaffold")], [tmp_path / "run"], checkpoint_seconds=0)
    assert same([stopped[1]], [resumed])


def test_rounds_between_checkpoints_wait_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take longer to store a line for good than a GPU to train a round."""
    counts, sync = [], os.fsync
    for rounds in (2, 9):
        calls: list[int] = []
        monkeypatch.setattr(os, "fsync", lambda file, calls=calls: (calls.append(file), sync(file)))
        run_pack(task_of(rounds), [spec("fedavg")], [tmp_path / str(rounds)])
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("cut", "log"),
    [("empty", False), ("zeros", False), ("half", True), ("last byte", True), ("zeros", True)],
)
def test_power_loss_in_the_middle_of_the_newest_files(
    tmp_path: Path, stopped: tuple[Path, History], cut: str, log: bool
) -> None:
    """The newest checkpoint is cut, or the last line of the log, which it needs."""
    place, whole = tmp_path / "run", stopped[1]
    shutil.copytree(stopped[0], place)
    path = place / ("metrics.jsonl" if log else NEWEST)
    content = path.read_bytes()
    start = content.rstrip(b"\n").rindex(b"\n") + 1 if log else 0
    path.write_bytes(content[:start] + CUTS[cut](content[start:]))
    progress = Stop(99, pack=99)
    [resumed] = run_pack(task_of(8), [spec("scaffold")], [place], progress=progress)
    assert same([whole], [resumed])
    assert len(progress.lines) == 1
    assert path.name in progress.said
    assert "from round 4" in progress.said
    records = [json.loads(text) for text in path.read_bytes().splitlines()[-3:]] if log else []
    assert all(record["round"] in (6, 7, 8) for record in records)


def test_rows_written_after_the_checkpoint_may_be_torn(
    tmp_path: Path, stopped: tuple[Path, History], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flush, new bytes of a row can be on the disk under its old stamp."""
    place, whole = tmp_path / "run", stopped[1]
    shutil.copytree(stopped[0], place)
    old = (place / "memory.stamps").read_bytes()
    with pytest.raises(MemoryError):
        run_pack(task_of(8), [spec("scaffold")], [place], progress=Stop(7), checkpoint_seconds=1e9)
    (place / "memory.stamps").write_bytes(old)
    [resumed] = run_pack(task_of(8), [spec("scaffold")], [place])
    assert same([whole], [resumed])
