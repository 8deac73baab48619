"""Directory locks: one process per directory, with a heartbeat and a fencing token."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from fedzmg.errors import InputError
from fedzmg.storage.files import remove_leftovers, write_atomic
from fedzmg.storage.reading import read_file, strict_json

NAME = "lock.json"
GUARD = ".lock.guard"
KEPT = "kept.json"
"""Marker of a kept copy, which has no checkpoints to continue from."""

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 180.0
"""Age of the last heartbeat at which a process on another machine counts as gone."""

GUARD_SECONDS = 30.0
BIRTH_SECONDS = 2.0
"""Tolerance of a process's start time, which follows corrections of the clock."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a directory."""

    user: str
    host: str
    pid: int
    process: str
    """Start time of the process, which tells reused process ids apart."""
    machine: str
    """Boot time and process namespace: process ids are comparable within one."""
    started: float
    heartbeat: float
    token: str = ""
    """Random fencing token of this hold."""

    def __post_init__(self) -> None:
        words = (self.user, self.host, self.process, self.machine, self.token)
        times = (self.started, self.heartbeat)
        known = all(isinstance(one, str) for one in words) and type(self.pid) is int
        if not known or not all(isinstance(t, int | float) and abs(t) < 1e11 for t in times):
            raise TypeError("a lock with a value of another type")

    @classmethod
    def of_this_process(cls) -> Owner:
        """Describe this process."""
        now, process = time.time(), psutil.Process()
        user, birth, token = process.username(), process.create_time(), secrets.token_hex(8)
        host, machine = socket.gethostname(), _machine()
        return cls(user, host, process.pid, str(birth), machine, now, now, token)

    @property
    def is_gone(self) -> bool:
        """True if the process has ended, as far as this machine can tell."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return time.time() - self.heartbeat > STALE_SECONDS
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(process.create_time() - float(self.process)) > BIRTH_SECONDS
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return True
        except psutil.AccessDenied:
            return False

    def __str__(self) -> str:
        now = time.time()
        age, silence = (timedelta(seconds=round(now - t)) for t in (self.started, self.heartbeat))
        is_quiet = silence.total_seconds() > 2 * HEARTBEAT_SECONDS
        known = f" (last heartbeat {silence} ago)" if is_quiet else ""
        return f"process {self.pid} of {self.user} on {self.host} for {age}{known}"


class Hold:
    """Directories that this process holds."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.paths: list[Path] = []
        self._made: list[Path] = []

    def check(self) -> None:
        """Read the fencing tokens again before anything is written."""
        for path in self.paths:
            if not self._is_ours(path):
                raise InputError(
                    f"the lock of {path} was removed or taken over: this process stops; run the "
                    "same command again when no other process uses the directory"
                )

    def take(self, path: Path, say: Callable[[str], None]) -> None:
        """Lock one more directory and create it if it is missing."""
        path = path.absolute()
        try:
            for parent in reversed([p for p in (path, *path.parents) if not p.exists()]):
                # A directory that another process makes meanwhile is not ours to remove.
                with contextlib.suppress(FileExistsError):
                    parent.mkdir()
                    self._made.append(parent)
            with FileLock(path / GUARD, timeout=GUARD_SECONDS):
                try:
                    self._take_over(path, say)
                finally:
                    # Removed while it is held: a waiting process notices and creates a new one.
                    with contextlib.suppress(OSError):
                        os.unlink(path / GUARD)
        except Timeout:
            raise InputError(f"another process is locking {path} right now: try again") from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot write the run directory {path}: {reason}; choose another one with --out"
            ) from None

    def _take_over(self, path: Path, say: Callable[[str], None]) -> None:
        remove_leftovers(path / NAME)
        other = read_owner(path)
        if other is not None and not other.is_gone:
            raise InputError(
                f"{path} is in use by {other}: wait for it, stop it or choose another "
                f"directory with --out; if it is certainly gone, remove {NAME} there"
            )
        if other is not None:
            say(f"{path} was left locked by {other}, which is gone: taken over")
        self.paths.append(path)
        self._write(path)

    def keep_beating(self, ended: threading.Event) -> None:
        """Refresh the heartbeat of every directory that is still ours, until the end."""
        while not ended.wait(HEARTBEAT_SECONDS):
            self.owner = replace(self.owner, heartbeat=time.time())
            for path in self.paths:
                # On a full disk the lock merely looks older than it is.
                with contextlib.suppress(OSError, InputError):
                    if self._is_ours(path):
                        self._write(path)

    def release(self) -> None:
        """Unlock everything and remove directories that stayed empty."""
        for path in self.paths:
            with contextlib.suppress(OSError, InputError):
                if self._is_ours(path):
                    os.unlink(path / NAME)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()

    def _is_ours(self, path: Path) -> bool:
        found = read_owner(path)
        return found is not None and found.token == self.owner.token

    def _write(self, path: Path) -> None:
        write_atomic(path / NAME, json.dumps(asdict(self.owner), indent=1).encode())


@contextlib.contextmanager
def hold(paths: Sequence[Path], say: Callable[[str], None]) -> Iterator[Hold]:
    """Hold directories until the block ends; missing ones are created.

    ``say`` reports a directory that is taken over from a process that is gone. A directory of a
    living process, of a kept copy, or one that cannot be written is refused.
    """
    held = Hold(Owner.of_this_process())
    ended = threading.Event()
    heart = threading.Thread(target=held.keep_beating, args=(ended,), name="lock", daemon=True)
    try:
        for path in paths:
            if kept_copy(path) is not None:
                raise InputError(
                    f"{path} belongs to a kept copy, which has no checkpoints to continue from: "
                    "read it with 'fedzmg report', or choose another directory with --out"
                )
            held.take(path, say)
        if held.paths:
            heart.start()
        yield held
    finally:
        ended.set()
        if heart.is_alive():
            heart.join()
        held.release()


def kept_copy(path: Path) -> Path | None:
    """Return the kept copy that a directory is or belongs to, if any."""
    whole = path.absolute()
    return next((parent for parent in (whole, *whole.parents) if (parent / KEPT).is_file()), None)


def read_owner(path: Path) -> Owner | None:
    """Read the owner of a directory; a lock that cannot be read is as old as its file."""
    try:
        return Owner(**strict_json(read_file(path / NAME)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        with contextlib.suppress(OSError):
            written = (path / NAME).stat().st_mtime
            return Owner("unknown", "an unknown machine", 0, "", "", written, written)
        return None


def _machine() -> str:
    namespace = ""
    with contextlib.suppress(OSError):  # containers may share a host name
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{psutil.boot_time():.0f} {namespace}"
