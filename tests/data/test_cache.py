from __future__ import annotations

import errno
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


def test_a_lock_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot write .*set FEDZMG_DATA"),
        cache.lock(tmp_path / "file" / "a.lock", print),
    ):
        pass

    def unsupported(self: object, **_: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    with (
        pytest.raises(InputError, match=r"flock; .*set FEDZMG_DATA"),
        cache.lock(tmp_path / "a.lock", print),
    ):
        pass


def test_system_errors_become_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"x.npy: full; .*FEDZMG_DATA"),
        cache.writing(tmp_path / "new" / "x.npy"),
    ):
        raise OSError(errno.ENOSPC, "full")
