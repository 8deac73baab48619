"""Data folder, locks, disk errors, hashes and progress."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import platformdirs
from filelock import FileLock, Timeout

from fedzmg.errors import InputError

ENVIRONMENT = "FEDZMG_DATA"
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Progress(Protocol):
    """Receiver of progress updates."""

    def begin(self, what: str, total: int | None) -> None:
        """Start a piece of work of ``total`` bytes, where known."""

    def advance(self, done: int) -> None:
        """Report the bytes that are done."""

    def say(self, text: str) -> None:
        """Print a line."""


class Silent:
    """Progress that prints nothing."""

    def begin(self, what: str, total: int | None) -> None:
        """Do nothing."""

    def advance(self, done: int) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Do nothing."""


SILENT = Silent()


def root(given: Path | None = None) -> Path:
    """Return the data folder: the one given, else ``$FEDZMG_DATA``, else the user's cache."""
    named = given or os.environ.get(ENVIRONMENT) or None
    if named is None:
        return platformdirs.user_cache_path("fedzmg", appauthor=False)
    return Path(named).expanduser().absolute()


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock that only one process can have; it is freed when its process ends.

    Args:
        path: the lock file.
        waiting: called once if another process holds it.
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
    """Turn a system error while writing ``size`` bytes to ``path`` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a parser, not by the system
            raise
        if error.errno in _NO_ROOM:
            there = next((parent for parent in path.parents if parent.exists()), None)
            free = shutil.disk_usage(there).free if there else 0
            # With free space on the disk, a quota was hit.
            lacking = max(1, -(-(size - free if size > free else size) // 2**20))
            raise InputError(
                f"disk is full while writing {path}: free {lacking} MiB or set {ENVIRONMENT}"
            ) from None
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; set {ENVIRONMENT} to another folder"
        ) from None


def size_of(path: Path) -> int:
    """Return the bytes of a file or of all files below a folder; 0 if there is none."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def file_hash(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
