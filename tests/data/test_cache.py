from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from fedzmg.data import cache
from fedzmg.errors import InputError


@pytest.mark.skipif(sys.platform != "linux", reason="XDG folders")
def test_the_folder_is_the_one_given_else_the_variable_else_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDZMG_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.root() == tmp_path / "home" / ".cache" / "fedzmg"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.root() == tmp_path / "xdg" / "fedzmg"
    monkeypatch.setenv("FEDZMG_DATA", "")
    assert cache.root() == tmp_path / "xdg" / "fedzmg"
    monkeypatch.setenv("FEDZMG_DATA", "~/data")
    assert cache.root() == tmp_path / "home" / "data"
    monkeypatch.chdir(tmp_path)
    assert cache.root(Path("here")) == tmp_path / "here"


def test_a_lock_is_waited_for_and_freed_when_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "a.lock"
    path.parent.mkdir()
    script = (
        "import filelock, sys, time; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); "
        "print('held', flush=True); sys.stdin.read(1); import os; os._exit(1)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    waited = []

    def waiting() -> None:
        waited.append(holder.poll())
        holder.stdin.write("x")  # type: ignore[union-attr]
        holder.stdin.close()  # type: ignore[union-attr]

    with cache.lock(path, waiting):
        assert holder.wait(10) == 1
    assert waited == [None]
    holder.stdout.close()
    with cache.lock(path, lambda: waited.append(0)):
        pass
    assert waited == [None]


def test_a_lock_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot write .*set FEDZMG_DATA"),
        cache.lock(tmp_path / "file" / "a.lock"),
    ):
        pass

    def unsupported(self: object, **_: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    with (
        pytest.raises(InputError, match="cannot hold locks: set FEDZMG_DATA"),
        cache.lock(tmp_path / "a.lock"),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "free", "message"),
    [
        (errno.ENOSPC, 3 * 2**20, "disk is full while writing {}: free 7 MiB or set FEDZMG_DATA"),
        (errno.EDQUOT, 2**40, "disk is full while writing {}: free 10 MiB or set FEDZMG_DATA"),
        (errno.EACCES, 0, "cannot write {}: no; set FEDZMG_DATA"),
    ],
)
def test_what_the_system_says_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, free: int, message: str
) -> None:
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda _: shutil._ntuple_diskusage(free, 0, free),  # type: ignore[attr-defined]
    )
    path = tmp_path / "new" / "x.npy"
    with pytest.raises(InputError) as caught, cache.writing(path, 10 * 2**20):
        raise OSError(code, "no")
    assert str(caught.value).startswith(message.format(path))
