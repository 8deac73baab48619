"""One process per directory: who holds it, since when, and whether that process still lives."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from fedzmg.errors import InputError
from fedzmg.storage.files import remove_leftovers, write_atomic

NAME = "lock.json"
GUARD = ".lock.guard"
KEPT = "kept.json"
"""Marks a copy for keeping, in which nothing can go on: it has no checkpoints."""

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 180.0
"""Silence after which a process on another machine counts as gone."""

GUARD_SECONDS = 30.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a directory."""

    user: str
    host: str
    pid: int
    process: str
    """Tells apart processes that get the same number one after another; empty if unknown."""
    machine: str
    """Processes of one machine see each other's numbers; empty if unknown."""
    started: float
    heartbeat: float

    @classmethod
    def of_this_process(cls) -> Owner:
        """The owner that this process would be."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may run under a number without a name
            user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
        now = time.time()
        pid = os.getpid()
        return cls(user, socket.gethostname(), pid, _birth(pid), _machine(), now, now)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, as far as can be told from here."""
        if (self.host, self.machine) != (socket.gethostname(), _machine()):
            return time.time() - self.heartbeat > STALE_SECONDS
        return not _lives(self.pid) or _birth(self.pid) != self.process

    def is_same(self, other: Owner | None) -> bool:
        """Whether both are one process and one hold."""
        return other is not None and replace(other, heartbeat=self.heartbeat) == self

    def __str__(self) -> str:
        age, silence = (_duration(time.time() - t) for t in (self.started, self.heartbeat))
        quiet = time.time() - self.heartbeat > 2 * HEARTBEAT_SECONDS
        known = f" (last sign of life {silence} ago)" if quiet else ""
        return f"process {self.pid} of {self.user} on {self.host} for {age}{known}"


class Hold:
    """Directories that this process holds; :meth:`check` says when one of them was lost."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.paths: list[Path] = []
        self._made: list[Path] = []
        self._lost: tuple[Path, Owner | None] | None = None

    def check(self) -> None:
        """Stop before anything is written to a directory that another process has taken.

        Raises:
            InputError: if this process was silent so long that it was taken for gone.
        """
        if self._lost is not None:
            path, other = self._lost
            taker = "removed" if other is None else f"taken over by {other}"
            raise InputError(
                f"the lock of {path} was {taker}: this process stops; run the same command again "
                "once no other is at work there"
            )

    def take(self, path: Path, say: Callable[[str], None]) -> None:
        """Hold one more directory, which is made if need be."""
        path = path.absolute()
        guard = FileLock(path / GUARD)
        try:
            self._make(path)
            guard.acquire(timeout=GUARD_SECONDS)
        except Timeout:
            raise InputError(
                f"{path} is being taken by another process right now: try again"
            ) from None
        except (OSError, NotImplementedError) as error:
            raise _unwritable(path, error) from None
        try:
            remove_leftovers(path / NAME)
            other = read_owner(path)
            if other is not None and not other.is_gone:
                raise InputError(
                    f"{path} is in use by {other}: wait for it, stop it or choose another place "
                    f"with --out; if it is gone for certain, remove {NAME} there"
                )
            if other is not None:
                say(f"{path} was left locked by {other}, which is gone: taken over")
            self.paths.append(path)
            self._write(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        finally:
            with contextlib.suppress(OSError):
                # Removed while it is held: who waits for it finds that out and makes a new one.
                os.unlink(path / GUARD)
            guard.release()

    def beat(self) -> None:
        """Show every holder-to-be that this process lives."""
        self.owner = replace(self.owner, heartbeat=time.time())
        for path in self.paths:
            found = read_owner(path)
            if self.owner.is_same(found):
                # On a full disk the lock simply looks older than it is.
                with contextlib.suppress(OSError):
                    self._write(path)
            else:
                self._lost = path, found

    def release(self) -> None:
        """Let go of everything, and remove directories that were made for nothing."""
        for path in self.paths:
            if self.owner.is_same(read_owner(path)):
                with contextlib.suppress(OSError):
                    os.unlink(path / NAME)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()

    def _make(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for parent in reversed(missing):
            # Another process may make it meanwhile; then it is not ours to remove.
            with contextlib.suppress(FileExistsError):
                parent.mkdir()
                self._made.append(parent)
        path.mkdir(exist_ok=True)

    def _write(self, path: Path) -> None:
        write_atomic(path / NAME, json.dumps(asdict(self.owner), indent=1).encode())


@contextlib.contextmanager
def hold(paths: Sequence[Path], say: Callable[[str], None]) -> Iterator[Hold]:
    """Hold directories until the block is left, however it is left.

    Args:
        paths: run directories or the directory of a study; made if need be.
        say: told when a directory is taken over from a process that is gone.

    Raises:
        InputError: if a process that lives holds one of them, one belongs to a kept copy, or cannot
            be written.
    """
    held = Hold(Owner.of_this_process())
    ended = threading.Event()

    def keep_beating() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            held.beat()

    heart = threading.Thread(target=keep_beating, name="lock", daemon=True)
    try:
        for path in paths:
            _refuse_kept_copies(path)
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
    """The kept copy that a directory is or belongs to, if any."""
    whole = path.absolute()
    return next((place for place in (whole, *whole.parents) if (place / KEPT).is_file()), None)


def _refuse_kept_copies(path: Path) -> None:
    if kept_copy(path) is not None:
        raise InputError(
            f"{path} belongs to a kept copy, which has no checkpoints to go on from: read it with "
            "'fedzmg report', or train at another place with --out"
        )


def read_owner(path: Path) -> Owner | None:
    """Who holds a directory, or None; a lock that cannot be read is as old as its file."""
    try:
        return Owner(**json.loads((path / NAME).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        pass
    try:
        written = (path / NAME).stat().st_mtime
    except OSError:
        return None
    return Owner("unknown", "an unknown machine", 0, "", "", written, written)


def _unwritable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(
        f"cannot write the run directory {path}: {reason}; choose another place with --out"
    )


def _lives(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 would end the process
        return _lives_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it lives, and belongs to somebody else
        return True
    return _state(pid) != "Z"


def _lives_on_windows(pid: int) -> bool:
    import ctypes

    kernel = ctypes.windll.kernel32  # type: ignore[attr-defined]
    handle = kernel.OpenProcess(0x1000, False, pid)  # may ask for limited information
    if not handle:
        return bool(kernel.GetLastError() == 5)  # it lives, and belongs to somebody else
    code = ctypes.c_ulong()
    kernel.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel.CloseHandle(handle)
    return code.value == 259  # still active


def _fields(pid: int) -> list[str]:
    """What Linux tells about a process after its name, which may hold any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_fields(pid) or [""])[0]


def _birth(pid: int) -> str:
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 else ""


def _machine() -> str:
    """This start of this machine, and the space in which its processes are numbered."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _duration(seconds: float) -> str:
    """Seconds in words.

    >>> _duration(42), _duration(600), _duration(7300)
    ('42 s', '10 min', '2.0 h')
    """
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
