"""Data folder, locks, disk errors, hashes and progress."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

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

    @staticmethod
    def begin(*_: Any, **__: Any) -> None:
        """Do nothing."""

    advance = say = begin


SILENT = Silent()


def root(given: Path | None = None) -> Path:
    """Return the data folder: the one given, else ``$FEDZMG_DATA``, else the user's cache."""
    named = given or os.environ.get(ENVIRONMENT) or None
    if named is None:
        return platformdirs.user_cache_path("fedzmg", appauthor=False)
    return Path(named).expanduser().absolute()


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that only one process can have; it is freed when its process ends.

    ``waiting`` is called once if another process holds it.
    """
    guard = FileLock(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            guard.acquire(timeout=0)
        except Timeout:
            waiting()
            guard.acquire()
        except NotImplementedError as error:  # a file system without locks
            raise OSError(errno.ENOLCK, str(error)) from None
    try:
        yield
    finally:
        guard.release()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a system error while writing ``path`` into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by a parser, not by the system
            raise
        reason = "disk is full" if error.errno in _NO_ROOM else error.strerror
        raise InputError(
            f"cannot write {path}: {reason}; free space or set {ENVIRONMENT} to another folder"
        ) from None


def size_of(path: Path) -> int:
    """Return the bytes of all files below a folder; 0 if there is none."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def file_hash(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
