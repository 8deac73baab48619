"""Worker processes on the CPU cores of this machine."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, TypeAlias, cast

import psutil
import torch

from fedzmg.cluster.workers import LostWorker, Needs, RemoteError
from fedzmg.errors import InputError
from fedzmg.experiment.training import on_interrupt
from fedzmg.simulation import resolve_device

CGROUP = Path("/sys/fs/cgroup")  # has limits of a container, which other counts leave out
KILL_SECONDS = 5.0
Pipe: TypeAlias = "connection.Connection[Any, Any]"


def cores() -> int:
    """Count the CPU cores that this process may use."""
    has = hasattr(os, "sched_getaffinity")
    found = len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())  # "max" is no quota
        found = min(found, max(1, quota // period))
    return found


def free_memory() -> float:
    """Return the bytes of memory that this process may still take."""
    found = float(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        most, now = (float((CGROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
        found = min(found, most - now)
    return found


class Processes:
    """Workers on this machine, by default one per core; they share torch's threads."""

    def __init__(self, on: str, number: int | None) -> None:
        self.on, self.number = on, number or cores()  # ``on`` as the user named it
        self.threads = max(1, min(torch.get_num_threads(), cores()) // self.number)

    def needs(self, device: str) -> Needs:
        """Return the resources of a worker for a device of a specification."""
        if resolve_device(device).type != "cpu":
            remedy = "set the device to cpu, or use --on ray"
            raise InputError(f"--on {self.on} trains on a CPU: {remedy}")
        return Needs(self.threads)

    def workers(self, needs: Needs) -> int:
        """Count the workers that train at the same time."""
        return self.number

    def pool(self) -> "contextlib.closing[ProcessPool]":
        """Start the workers of a training, and end them afterwards."""
        return contextlib.closing(ProcessPool(self.number))


class ProcessPool:
    """Runs each piece of work in a process of its own, some at a time; handles are pipes."""

    board = None  # each worker gets its own

    def __init__(self, number: int) -> None:
        self._context: Any = multiprocessing.get_context("spawn")
        if sys.platform == "linux":
            # A server loads torch once; a copy of this process would share its threads' locks.
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(["fedzmg.cluster.worker"])
            # Workers ignore Ctrl-C until they have imported what they need.
            with on_interrupt(signal.SIG_IGN):
                forkserver.ensure_running()
        self._number, self._memory = number, free_memory()
        # A worker that is killed while it reads an Event would leave its lock behind.
        self._stop = self._context.Value("b", 0, lock=False)
        self._waiting: deque[tuple[Pipe, Pipe, Sequence[Any], float]] = deque()
        self._running: dict[Pipe, tuple[Any, float]] = {}  # process, and its memory
        self._ended: dict[Pipe, Any] = {}
        self._messages: list[tuple[str, Any]] = []

    def submit(
        self, function: Callable[..., Any], arguments: Sequence[Any], _: Needs, memory: float
    ) -> Pipe:
        """Let a worker call a function; return a handle."""
        here, there = self._context.Pipe()
        self._waiting.append((here, there, (function, *arguments), memory))
        self._start()
        return cast("Pipe", here)

    def wait(self, handles: Sequence[Pipe], seconds: float) -> list[Pipe]:
        """Wait for the first of them to end; return those that have ended."""
        if self._ended.keys().isdisjoint(handles):
            self._receive(seconds)
        return [handle for handle in handles if handle in self._ended]

    def result(self, handle: Pipe) -> Any:
        """Return the result of work that has ended; raise ``LostWorker`` if its worker died."""
        found = self._ended.pop(handle)
        if isinstance(found, LostWorker):
            raise found
        return found

    def messages(self) -> list[tuple[str, Any]]:
        """Return the messages of workers since the last call, with their labels."""
        self._receive(0.0)
        found, self._messages = self._messages, []
        return found

    def stop(self) -> None:
        """Ask all workers to stop after their rounds."""
        self._stop.value = 1
        self._ended |= dict.fromkeys(pipe for pipe, *_ in self._waiting)
        self._waiting.clear()

    def close(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.join(KILL_SECONDS)
            process.kill()

    def _start(self) -> None:
        """Start waiting work while there are cores and memory for it."""
        while self._waiting and len(self._running) < self._number:
            pipe, there, arguments, memory = self._waiting[0]
            taken = sum(needed for _, needed in self._running.values())
            if self._running and taken + memory > self._memory:
                return
            self._waiting.popleft()
            process = self._context.Process(target=_serve, args=(there, self._stop, *arguments))
            ignored = on_interrupt(signal.SIG_IGN)
            with contextlib.nullcontext() if sys.platform == "linux" else ignored:
                process.start()
            there.close()
            self._running[pipe] = process, memory

    def _receive(self, seconds: float) -> None:
        """Receive messages and results; wait for the first."""
        ends = [process.sentinel for process, _ in self._running.values()]
        connection.wait([*self._running, *ends], seconds)
        for pipe, (process, _) in list(self._running.items()):
            works = process.is_alive()  # else everything that it sent is in the pipe
            try:
                while pipe not in self._ended and pipe.poll():
                    label, found = pipe.recv()
                    if label is None:
                        self._ended[pipe] = found
                    else:
                        self._messages.append((label, found))
            except (EOFError, OSError):
                works = False
            if not works and pipe not in self._ended:
                process.join()
                self._ended[pipe] = LostWorker(f"exit code {process.exitcode}")
            if pipe in self._ended:
                process.join(KILL_SECONDS)
                del self._running[pipe]
                self._start()


class PipeBoard:
    """A worker's connection to the driver."""

    def __init__(self, pipe: Pipe, stop: Any) -> None:
        self._pipe, self._stop = pipe, stop

    def post(self, label: str, message: Any) -> None:
        """Send a message, if there is one; do not wait for the answer."""
        if message is not None:
            self._pipe.send((label, message))

    def stops(self, seconds: float = 0.0) -> bool:
        """Tell whether the driver wants to stop; ``seconds`` are for boards that answer late."""
        return bool(self._stop.value)


def _serve(
    pipe: Pipe, stop: Any, function: Callable[..., Any], setup: Any, *arguments: Any
) -> None:
    # Ctrl-C is the driver's, which asks for a stop after the round.
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    found: Any
    try:
        found = function(setup._replace(board=PipeBoard(pipe, stop)), *arguments)
    except Exception as error:
        # The driver tells a full disk and too little memory in one line, unless a model failed.
        kinds = () if hasattr(error, "__notes__") else (MemoryError, OSError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        found = RemoteError(kind, str(error), "".join(traceback.format_exception(error)))
    pipe.send((None, found))


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)
