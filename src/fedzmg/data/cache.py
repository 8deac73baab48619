"""Where data lives on this machine: the folder, who writes there now, and room on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fedzmg.errors import InputError

ENVIRONMENT = "FEDZMG_DATA"
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def root(given: Path | None = None) -> Path:
    """The data folder: what is given, else ``$FEDZMG_DATA``, else the user's cache folder.

    Raises:
        InputError: if none of them says a place.
    """
    named = given or os.environ.get(ENVIRONMENT) or None
    try:
        if named is not None:
            return Path(named).expanduser().absolute()
        return _user_cache() / "fedzmg"
    except RuntimeError:  # no home folder
        raise InputError(
            f"no home folder is known to keep data in: set {ENVIRONMENT} to a folder"
        ) from None


def _user_cache() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    # The standard for these folders says that a relative one does not count.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) if os.path.isabs(base) else Path.home() / ".cache"


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock that only one process can have; it goes with the process that holds it.

    Args:
        path: the lock file, made if need be.
        waiting: called once if another process has it now.

    Raises:
        InputError: if the lock file cannot be made.
    """
    guard = FileLock(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            guard.acquire(timeout=0)
        except Timeout:
            if waiting is not None:
                waiting()
            guard.acquire()
        except NotImplementedError:
            raise InputError(
                f"{path.parent} cannot hold locks: set {ENVIRONMENT} to a folder on a local disk"
            ) from None
    try:
        yield
    finally:
        guard.release()


@contextlib.contextmanager
def writing(path: Path, size: int = 0) -> Iterator[None]:
    """Turn what the system says against writing ``size`` bytes to ``path`` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise InputError(
                f"disk is full while writing {path}: free {_missing(path, size)} MiB or set "
                f"{ENVIRONMENT} to a folder with more room"
            ) from None
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; set {ENVIRONMENT} to a folder that "
            "can be written"
        ) from None


def _missing(path: Path, size: int) -> int:
    """Whole MiB that writing ``size`` more bytes lacks, at least one."""
    there = next((place for place in path.parents if place.exists()), None)
    free = shutil.disk_usage(there).free if there else 0
    # With room on the disk it is a quota or a limit on files that was hit.
    lacking = size - free if size > free else size
    return max(1, -(-lacking // 2**20))


def size_of(path: Path) -> int:
    """Bytes of a file or of all files below a folder; nothing is 0."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
