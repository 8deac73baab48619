"""Two machines with other clocks on one directory: the slower one stops, no bit moves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys import same, toy

from fedzmg.errors import InputError
from fedzmg.experiment.progress import Silent
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.simulation import RoundReport
from fedzmg.storage import lock

TASK = toy(rounds=20, epochs=1, eval_every=5)
SPEC = RunSpec(task="toy", algorithm="scaffold", engine="vectorized", device="cpu")


class OnCommand(Silent):
    """Rounds that end when a line, or the end of the input, says so."""

    def begin(self, label: str, rounds: int, done: int) -> None:
        print("training", flush=True)

    def advance(self, report: RoundReport) -> None:
        sys.stdin.readline()


def train_on(host: str, clock: float, path: Path) -> int:
    """Train as a machine of that name whose clock is so many seconds ahead."""
    now = time.time
    time.time = lambda: now() + clock
    socket.gethostname = lambda: host
    lock.HEARTBEAT_SECONDS, lock.WATCH_SECONDS = 0.1, 3.0
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        run_pack(TASK, [SPEC], [path], progress=OnCommand(), checkpoint_seconds=0.01)
    except InputError as error:
        print("stopped:", error, flush=True)
        return 2
    return 0


def start(host: str, clock: float, path: Path) -> subprocess.Popen[str]:
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import test_two_machines as t; "
        "sys.exit(t.train_on(sys.argv[2], float(sys.argv[3]), pathlib.Path(sys.argv[4])))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), host, str(clock), str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def proceed(process: subprocess.Popen[str], steps: int, until: str) -> None:
    """Let a process take some steps and wait for a line of its output."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n" * steps)
    process.stdin.flush()
    lines = iter(process.stdout.readline, "")
    assert any(line == f"{until}\n" for line in lines), until


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("clock", [1000.0, pytest.param(-1000.0, marks=pytest.mark.slow)])
def test_a_paused_machine_stops_when_it_continues(tmp_path: Path, clock: float) -> None:
    path = tmp_path / "run"
    machines = [start("one", 0.0, path), start("two", clock, path), start("two", clock, path)]
    first, refused, second = machines
    try:
        for machine in machines:
            proceed(machine, 0, "ready")
        proceed(first, 5, "training")
        assert "in use" in refused.communicate("\n")[0]
        assert refused.returncode == 2
        first.send_signal(signal.SIGSTOP)
        proceed(second, 5, "training")
        first.send_signal(signal.SIGCONT)
        assert "stopped: the lock of" in first.communicate()[0]
        assert first.returncode == 2
        second.communicate()
        assert second.returncode == 0
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    [found] = run_pack(TASK, [SPEC], [path])
    [whole] = run_pack(TASK, [SPEC])
    assert same([whole], [found])
