"""Processes that a soak disturbs, faults of their system calls, and damage to their files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after which a start counts as hung."""
INTERRUPTED = 130
Change = Callable[[], object]


class Failure(Exception):
    """Behaviour that is not allowed."""


class Process:
    """A command in a copy of this process, which has loaded everything already."""

    def __init__(self, arguments: list[str], changes: list[Change]) -> None:
        self.code: int | None = None
        self._reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # nobody reads before the end
            fcntl.fcntl(writer, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(writer, 2)
            execute(arguments, changes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(writer)

    def ended(self) -> bool:
        """Return whether the process has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def sleep(self, seconds: float) -> bool:
        """Wait for some time or until the process ends; return whether it still runs."""
        end = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < end:
            time.sleep(0.002)
        return not self.ended()

    def send(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if not self.ended():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.send(signal.SIGKILL)
        self.sleep(PATIENCE)

    def finish(self, allowed: set[int]) -> int:
        """Wait for the end and check exit code and messages."""
        if self.sleep(PATIENCE):
            self.kill()
            raise Failure(f"hung for {PATIENCE:g} s")
        with os.fdopen(self._reader, errors="replace") as file:
            lines = file.read().splitlines()
        errors = [i for i, line in enumerate(lines, 1) if line.startswith("fedzmg: error: ")]
        one_line = errors == [len(lines)] if self.code == 2 else not errors
        if "Traceback" in "\n".join(lines) or self.code not in allowed or not one_line:
            raise Failure(f"exit code {self.code}: " + " | ".join(lines[-12:]))
        assert self.code is not None
        return self.code


def execute(arguments: list[str], changes: list[Change]) -> None:
    """Run a command in a new process and end it."""
    code: object = 1
    try:
        sink = os.open(os.devnull, os.O_RDWR)
        os.dup2(sink, 0)
        os.dup2(sink, 1)
        for change in changes:
            change()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = command(arguments)
    except KeyboardInterrupt:  # before the command began
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def command(arguments: list[str]) -> object:
    """Run a command line in this process; return its exit code."""
    from fedzmg.__main__ import main

    sys.argv = ["fedzmg", *arguments]
    try:
        main()
    except SystemExit as error:
        return error.code or 0
    return 0


class Fault:
    """System call that fails at some calls; it leaves files elsewhere alone."""

    def __init__(self, call: Callable[..., Any], fails: range, code: int, out: Path) -> None:
        self.call, self.fails, self.code, self.out = call, fails, code, str(out)
        self.count = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        where = arguments[0]
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where
        if str(where).startswith(self.out):
            self.count += 1
            if self.count in self.fails:
                raise OSError(self.code, os.strerror(self.code))
        return self.call(*arguments, **options)


def on_machine(name: str) -> Change:
    """Let a process believe that it runs on another machine, and wait less for others."""
    from fedzmg.storage import lock

    def change() -> None:
        socket.gethostname = lambda: name
        lock.HEARTBEAT_SECONDS = 0.2
        for constant in ("WATCH_SECONDS", "STALE_SECONDS"):
            if hasattr(lock, constant):
                setattr(lock, constant, 1.0)

    return change


def flip(content: bytes, rng: random.Random, _: bytes) -> bytes:
    """Flip one bit."""
    if not content:
        return b"\1"
    place = rng.randrange(len(content))
    changed = bytes([content[place] ^ 1 << rng.randrange(8)])
    return content[:place] + changed + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random, bytes], bytes | None]] = {
    "flip a bit of": flip,
    "truncate": lambda content, rng, _: content[: rng.randrange(len(content) + 1)],
    "zero": lambda content, *_: bytes(len(content)),
    "delete": lambda *_: None,
    "replace by that of another seed": lambda content, _, donor: donor or content,
}
