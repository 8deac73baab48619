"""Directory locks: one process per directory, also between machines that share a disk.

A process on this machine is gone when its process id is. A process on another machine is gone when
its heartbeat in the lock file stands still while we watch; clocks are not compared. A process that
was only paused finds another token in the lock before its next write, and stops. What it writes in
place, heartbeat and client memory, goes to files that the takeover has replaced.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeAlias

import psutil
import pydantic
from filelock import FileLock, Timeout

from fedzmg.errors import InputError
from fedzmg.storage.files import fences, remove_leftovers, renew, write_atomic
from fedzmg.storage.reading import read_file, strict_json

NAME = "lock.json"
IF_GONE = f"if it is certainly gone, remove {NAME} there"
GUARD = ".lock.guard"
KEPT = "kept.json"  # marker of a kept copy, which has no checkpoints to continue from
HEARTBEAT_SECONDS = 10.0
WATCH_SECONDS = 90.0  # without a heartbeat; network file systems may be a minute late
SIZE = 1024  # size of a lock file, the same after every heartbeat
IN_PLACE = "memory.*"  # files that are written in place: those of client memory

GUARD_SECONDS = 30.0
BIRTH_SECONDS = 2.0  # tolerance of a process's start time, which follows corrections of the clock
Time: TypeAlias = Annotated[float, pydantic.Field(gt=-1e11, lt=1e11)]


@pydantic.dataclasses.dataclass(frozen=True, config={"strict": True})
class Owner:
    """The process that holds a directory."""

    user: str
    host: str
    pid: int
    process: str  # start time of the process, which tells reused process ids apart
    machine: str  # boot time and process namespace: process ids are comparable within one
    started: Time
    heartbeat: Time  # time of the last heartbeat by the clock of that machine, for display
    token: str = ""  # random fencing token of this hold

    @classmethod
    def of_this_process(cls) -> "Owner":
        now, process, host = time.time(), psutil.Process(), socket.gethostname()
        user, birth, token = process.username(), str(process.create_time()), secrets.token_hex(8)
        return cls(user, host, process.pid, birth, _machine(), now, now, token)

    @property
    def is_elsewhere(self) -> bool:
        """True for a process of another machine or container, whose id says nothing here."""
        return (self.host, self.machine) != (socket.gethostname(), _machine())

    @property
    def is_gone(self) -> bool:
        """True if the process has ended; on another machine by the clocks, so only for display."""
        if self.is_elsewhere:
            return time.time() - self.heartbeat > WATCH_SECONDS
        try:
            process = psutil.Process(self.pid)
            is_other = abs(process.create_time() - float(self.process)) > BIRTH_SECONDS
            return is_other or process.status() == psutil.STATUS_ZOMBIE
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
        self._files: dict[Path, int] = {}
        self._made: list[Path] = []

    def check(self, written: Path | None = None) -> None:
        """Read the fencing tokens again: all, or those of the directories of a file."""
        around = None if written is None else written.absolute().parents
        for path in self._files:
            if (around is None or path in around) and not self._is_ours(path):
                stops = f"the lock of {path} was removed or taken over: this process stops"
                remedy = "run the same command again when no other process uses the directory"
                raise InputError(f"{stops}; {remedy}")

    def take(self, path: Path, silent: Mapping[Path, Owner], say: Callable[[str], None]) -> None:
        """Lock one more directory and create it if it is missing."""
        try:
            missing = [p for p in (path, *path.parents) if not p.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._made += reversed(missing)
            with FileLock(path / GUARD, timeout=GUARD_SECONDS):
                try:
                    self._take_over(path, silent.get(path), say)
                finally:
                    # Removed while it is held: a waiting process notices and creates a new one.
                    with contextlib.suppress(OSError):
                        os.unlink(path / GUARD)
        except Timeout:
            raise InputError(f"another process is locking {path} right now: try again") from None
        except (OSError, NotImplementedError) as error:
            reason = f"{getattr(error, 'strerror', None) or error}; choose another one with --out"
            raise InputError(f"cannot write the run directory {path}: {reason}") from None

    def _take_over(self, path: Path, silent: Owner | None, say: Callable[[str], None]) -> None:
        remove_leftovers(path, NAME)
        other = read_owner(path)
        if other is not None:
            if not (other == silent if other.is_elsewhere else other.is_gone):
                raise _in_use(path, other)
            say(f"{path} was left locked by {other}, which is gone: taken over")
        write_atomic(path / NAME, self._content())
        self._files[path] = os.open(path / NAME, os.O_RDWR)
        if other is not None and other.is_elsewhere:
            for file in path.rglob(IN_PLACE):
                renew(file)

    def keep_beating(self, ended: threading.Event) -> None:
        """Refresh the heartbeat of every directory, until the end."""
        while not ended.wait(HEARTBEAT_SECONDS):
            self.owner = replace(self.owner, heartbeat=time.time())
            for file in self._files.values():
                # On a full disk the lock merely looks older than it is.
                with contextlib.suppress(OSError):
                    os.pwrite(file, self._content(), 0)

    def release(self) -> None:
        for path, file in self._files.items():
            with contextlib.suppress(OSError, InputError):
                os.close(file)
                if self._is_ours(path):
                    os.unlink(path / NAME)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()

    def _is_ours(self, path: Path) -> bool:
        found = read_owner(path)
        return found is not None and found.token == self.owner.token

    def _content(self) -> bytes:
        return json.dumps(asdict(self.owner), indent=1).encode().ljust(SIZE)


@contextlib.contextmanager
def hold(paths: Sequence[Path], say: Callable[[str], None]) -> Iterator[Hold]:
    """Hold directories, created if missing; ``say`` reports one taken over from a gone process."""
    paths = [path.absolute() for path in paths]
    held = Hold(Owner.of_this_process())
    ended = threading.Event()
    heart = threading.Thread(target=held.keep_beating, args=(ended,), name="lock", daemon=True)
    try:
        for path in paths:
            if any((parent / KEPT).is_file() for parent in (path, *path.parents)):
                copy = f"{path} belongs to a kept copy, which has no checkpoints to continue from"
                remedy = "read it with 'fedzmg report', or choose another directory with --out"
                raise InputError(f"{copy}: {remedy}")
        silent = _watch(paths, say)
        fences.append(held.check)
        for path in paths:
            held.take(path, silent, say)
        if paths:
            heart.start()
        yield held
    finally:
        with contextlib.suppress(ValueError):
            fences.remove(held.check)
        ended.set()
        if heart.is_alive():
            heart.join()
        held.release()


def _watch(paths: Sequence[Path], say: Callable[[str], None]) -> dict[Path, Owner]:
    """Return directories whose owner on another machine gives no heartbeat while we watch."""
    found = {path: read_owner(path) for path in paths}
    silent = {path: owner for path, owner in found.items() if owner and owner.is_elsewhere}
    if not silent:
        return {}
    path, owner = next(iter(silent.items()))
    say(f"{path} is locked by {owner}: waiting {WATCH_SECONDS:.0f} s for its heartbeat; {IF_GONE}")
    end = time.monotonic() + WATCH_SECONDS
    while silent and time.monotonic() < end:
        time.sleep(min(1.0, WATCH_SECONDS / 20))
        for path, owner in list(silent.items()):
            now = read_owner(path)
            if now is None:
                del silent[path]
            elif now != owner:
                raise _in_use(path, now)
    return silent


def _in_use(path: Path, owner: Owner) -> InputError:
    remedy = "wait for it, stop it or choose another directory with --out"
    return InputError(f"{path} is in use by {owner}: {remedy}; {IF_GONE}")


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


def is_left_locked(path: Path) -> bool:
    """Tell whether an ended process of this machine left its lock in a writable directory."""
    owner = read_owner(path)
    is_left = owner is not None and not owner.is_elsewhere and owner.is_gone
    return is_left and os.access(path, os.W_OK)


def _machine() -> str:
    namespace = ""
    with contextlib.suppress(OSError):  # containers may share a host name
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{psutil.boot_time():.0f} {namespace}"
