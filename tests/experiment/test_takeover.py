"""Processes that are killed, or paused while another machine takes over: no bit moves."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Stop, same, toy

from fedzmg.errors import InputError
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import NEWEST, PREVIOUS
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import RoundReport
from fedzmg.storage import lock
from fedzmg.storage.client_metrics import CLIENTS

SPEC = RunSpec(task="toy", algorithm="scaffold", engine="vectorized", device="cpu")
"""Server state is in the checkpoint; client memory is apart, so it is the harder case."""
Start = Callable[..., Any]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


@pytest.fixture(scope="module")
def start() -> Start:
    """Start a function in a process that is forked from one with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        context.Process().start()

    def begin(function: Callable[..., None], *arguments: Any) -> Any:
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    return begin


def train(path: Path, rounds: int, progress: Any = None) -> Any:
    torch.set_num_threads(1)
    task = toy(rounds=rounds, epochs=1, eval_every=5)
    return run_pack(task, [SPEC], [path], progress=progress, checkpoint_seconds=0.01)


def lines(path: Path) -> int:
    log = path / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.slow
def test_kills_do_not_move_a_bit(tmp_path: Path, start: Start) -> None:
    """Every third process is killed at any moment of its start, the others after a few rounds."""
    path, rng, kills = tmp_path / "run", random.Random(4), 80
    for i in range(kills):
        process, before = start(train, path, 5 * kills), lines(path)
        began, rounds = time.monotonic(), rng.randint(1, 4)
        patience = 60.0 if i % 3 else rng.uniform(0, 0.3)
        while process.is_alive() and lines(path) < before + rounds:
            if time.monotonic() - began > patience:
                break
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    progress = Stop(99, pack=99)
    [resumed] = train(path, 5 * kills, progress)
    [whole] = train(tmp_path / "whole", 5 * kills)
    assert same([whole], [resumed])
    assert "taken over" in progress.said
    assert "cannot be used" not in progress.said
    # Lines that were superseded are still there, and nothing else is left of the crashes.
    assert lines(path) > len(whole.records)
    assert {p.name for p in path.iterdir()} == {
        "spec.toml", "manifest.json", "metrics.jsonl", NEWEST, PREVIOUS, CLIENTS,
        "memory.rows", "memory.stamps",
    }  # fmt: skip


class OnCommand(Silent):
    """Rounds that end when the other end of a pipe says so."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def begin(self, label: str, rounds: int, done: int) -> None:
        self.pipe.send("training")

    def advance(self, report: RoundReport) -> None:
        self.pipe.recv()


def train_on(host: str, clock: float, path: Path, pipe: Connection) -> None:
    """Train as a machine of that name whose clock is so many seconds ahead."""
    now = time.time
    time.time = lambda: now() + clock
    socket.gethostname = lambda: host
    lock.HEARTBEAT_SECONDS, lock.WATCH_SECONDS = 0.1, 3.0
    pipe.recv()
    try:
        train(path, 20, OnCommand(pipe))
    except InputError as error:
        pipe.send(str(error))
        sys.exit(2)


@pytest.mark.parametrize("clock", [1000.0, pytest.param(-1000.0, marks=pytest.mark.slow)])
def test_a_paused_machine_stops_when_it_continues(
    tmp_path: Path, start: Start, clock: float
) -> None:
    path = tmp_path / "run"
    machines, pipes = [], []
    for host, ahead in (("one", 0.0), ("two", clock), ("two", clock)):
        ours, theirs = multiprocessing.Pipe()
        machines.append(start(train_on, host, ahead, path, theirs))
        pipes.append(ours)
    first, refused, second = machines
    to_first, to_refused, to_second = pipes

    def proceed(pipe: Connection, steps: int) -> str:
        """Let a process begin or take some steps; return its next line."""
        for _ in range(steps):
            pipe.send("")
        return str(pipe.recv())

    try:
        assert proceed(to_first, 5) == "training"
        assert "in use" in proceed(to_refused, 1)
        os.kill(first.pid, signal.SIGSTOP)
        assert proceed(to_second, 5) == "training"
        os.kill(first.pid, signal.SIGCONT)
        assert proceed(to_first, 20).startswith("the lock of")
        for _ in range(20):
            to_second.send("")
        for machine in machines:
            machine.join()
        why = to_second.recv() if to_second.poll() else ""
        assert [machine.exitcode for machine in (first, refused, second)] == [2, 2, 0], why
    finally:
        for machine in machines:
            machine.kill()
    assert same(train(tmp_path / "whole", 20), train(path, 20))
