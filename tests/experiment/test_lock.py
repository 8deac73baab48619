"""Locks: one process per directory, and no lock outlives its process for long."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fedzmg.errors import InputError
from fedzmg.storage import lock
from fedzmg.storage.files import append
from fedzmg.storage.lock import Owner, hold, read_owner

# Locks need only two small modules of the package; loading all of it takes seconds.
HOLDER = """
import sys, types
from pathlib import Path
for name in ("fedzmg", "fedzmg.storage"):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(Path(sys.argv[2], *name.split(".")[1:]))]
from fedzmg.storage.lock import hold
try:
    with hold([Path(sys.argv[1])], print):
        print("held", flush=True)
        sys.stdin.read()
except BaseException as error:
    print(type(error).__name__, error, flush=True)
"""


def start(path: Path) -> subprocess.Popen[str]:
    """A process that holds a directory until its input ends."""
    package = Path(lock.__file__).parents[1]
    command = [sys.executable, "-c", HOLDER, str(path), str(package)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def never(text: str) -> None:
    pytest.fail(text)


def write(path: Path, **changes: Any) -> Owner:
    owner = replace(Owner.of_this_process(), **changes)
    path.mkdir(exist_ok=True)
    (path / "other").write_text(json.dumps(asdict(owner)))
    os.replace(path / "other", path / "lock.json")
    return owner


def test_second_process_is_told_who_is_at_work(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        with pytest.raises(InputError) as caught, hold([tmp_path / "run"], never):
            pytest.fail("held twice")
        message = str(caught.value)
        assert f"{tmp_path / 'run'} is in use by process {process.pid} of " in message
        assert f" on {os.uname().nodename} for " in message
        assert "\n" not in message
        # A failed attempt does not take the lock away.
        assert (tmp_path / "run" / "lock.json").exists()


def test_killed_process_loses_its_lock_at_once(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        process.kill()
        # Even while its parent has not asked for its end.
        said: list[str] = []
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(InputError), hold([tmp_path / "run"], said.append):
                break
        [line] = said
    assert f"was left locked by process {process.pid} of " in line
    assert line.endswith("which is gone: taken over")
    assert not list((tmp_path / "run").iterdir())


def test_interrupted_process_leaves_nothing(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("KeyboardInterrupt")
        process.wait()
        assert list(tmp_path.iterdir()) == []


def test_of_many_at_once_one_takes_a_stale_lock_over(tmp_path: Path) -> None:
    write(tmp_path / "run", pid=2**22 + 1)
    processes = [start(tmp_path / "run") for _ in range(4)]
    results = []
    for process in processes:
        assert process.stdout is not None
        first = process.stdout.readline()
        results.append(first + (process.stdout.readline() if "taken over" in first else ""))
    for process in processes:
        process.communicate()
    assert sum("held" in text for text in results) == 1
    assert sum("InputError" in text for text in results) == 3
    assert sum("taken over" in text for text in results) == 1


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    paths = [tmp_path / "there", tmp_path / "made" / "run"]
    with contextlib.suppress(MemoryError), hold(paths, never):
        assert [p.name for p in paths[1].iterdir()] == ["lock.json"]
        raise MemoryError
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    assert not list(paths[0].iterdir())


def test_if_one_is_in_use_none_is_held(tmp_path: Path) -> None:
    write(tmp_path / "b")
    with pytest.raises(InputError), hold([tmp_path / "a", tmp_path / "b"], never):
        pytest.fail("held")
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "b" / "lock.json").exists()


def test_number_given_to_another_process_is_not_its_owner(tmp_path: Path) -> None:
    for process in ("long ago", str(float(Owner.of_this_process().process) - 60)):
        write(tmp_path / "run", process=process)
        said: list[str] = []
        with hold([tmp_path / "run"], said.append):
            assert "taken over" in said[0]


@pytest.mark.parametrize(
    ("changes", "clock"),
    [({"host": "elsewhere"}, -1000), ({"machine": "another start"}, 1000)],
)
def test_process_elsewhere_is_gone_when_its_heartbeat_stands_still(
    tmp_path: Path, changes: dict[str, str], clock: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_SECONDS", 30.0)  # a change ends the watch at once
    owner = write(tmp_path, pid=2**22 + 1, heartbeat=time.time() + clock, **changes)
    ended = threading.Event()

    def beat() -> None:
        for count in itertools.count():
            write(tmp_path, **asdict(replace(owner, heartbeat=owner.heartbeat + count)))
            if ended.wait(0.01):
                break

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InputError, match="in use"), hold([tmp_path], lambda _: None):
            pytest.fail("held")
    finally:
        ended.set()
        thread.join()
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.2)
    (tmp_path / "memory.rows").write_bytes(b"kept" + bytes(lock.SIZE))
    with (tmp_path / "memory.rows").open("rb+") as late:
        said: list[str] = []
        with hold([tmp_path], said.append):
            assert "taken over" in said[-1]
            late.write(b"late")
            late.flush()
    assert (tmp_path / "memory.rows").read_bytes() == b"kept" + bytes(lock.SIZE)


def test_unreadable_lock_is_taken_over_if_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.1)
    (tmp_path / "lock.json").write_text('{"pid": 1}')
    said: list[str] = []
    with hold([tmp_path], said.append):
        assert "taken over" in said[-1]


def test_heartbeat_is_refreshed_and_a_lost_lock_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    with hold([tmp_path], never) as held:
        first = read_owner(tmp_path)
        assert first is not None
        deadline = time.monotonic() + 60
        while (found := read_owner(tmp_path)) is None or found.heartbeat <= first.heartbeat:
            assert time.monotonic() < deadline
        assert (found.started, found.token) == (first.started, first.token)
        held.check()
        # Another hold of this very process has another fencing token.
        other = write(tmp_path, started=first.started)
        with pytest.raises(InputError, match="taken over"):
            held.check()
        with pytest.raises(InputError, match="taken over"):
            append(tmp_path / "log", b"line")
        assert not (tmp_path / "log").exists()
        (tmp_path / "lock.json").unlink()
        with pytest.raises(InputError, match="removed"):
            held.check()
        write(tmp_path, **asdict(other))
    assert read_owner(tmp_path) == other


def test_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run.*--out"):
        hold([tmp_path / "file" / "run"], never).__enter__()
