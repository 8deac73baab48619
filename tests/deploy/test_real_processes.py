"""Federations of real processes over Flower, with TLS and authenticated nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedzmg import tasks
from fedzmg.experiment.run import run_pack
from fedzmg.experiment.run_directory import NODES, RunDirectory
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.plugins import load_reference
from fedzmg.storage.formats import read_json

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow
OWN = Path(__file__).with_name("own_task.py")
LONGEST = 900.0
"""Seconds after which a test gives up."""


def free_port() -> int:
    from fedzmg.deploy.processes import free_port

    return free_port()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a task and a run, as a new user has it."""
    shutil.copy(OWN, tmp_path / "own_task.py")
    (tmp_path / "run.toml").write_text(
        'task = "own_task.py:task"\nalgorithm = "scaffold"\n[protocol]\nrounds = 10\ncohort = 2\n'
    )
    return tmp_path


@contextlib.contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; end it and all of its children."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedzmg", "deploy", *arguments],
            cwd=folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        kill(process.pid)
        process.wait()


def kill(process: int) -> None:
    """Kill a process and all of its descendants, without a chance to say goodbye."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(process)
        for one in [*own.children(recursive=True), own]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + LONGEST
    while not condition():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.2)


def rounds(folder: Path) -> int:
    path = folder / "runs" / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def simulated(folder: Path, spec: RunSpec) -> Any:
    task = f"{OWN}:task"
    chosen = spec.model_copy(update={"task": load_reference(task), "engine": "sequential"})
    return run_pack(tasks.get(task), [chosen], [folder / "simulated"])[0]


ALGORITHMS = ["fedzmg", "fedadam", "scaffold", "mfl", "fedlion", "fedadap", "fedper", "fedavg"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_real_processes_give_the_model_of_a_simulation(folder: Path, name: str) -> None:
    options = {"algorithm": name, "client.lr": 0.05}
    if name == "fedavg":
        options |= {"federation.aggregator": "trimmed_mean", "protocol.cohort": 3}
    given = [part for item in options.items() for part in ("--set", "{}={}".format(*item))]
    command = ["local", "run.toml", "--clients", "3", *given]
    with started(folder, "local", *command) as process:
        assert process.wait(LONGEST) == 0, (folder / "local.log").read_text()[-2000:]
    directory = RunDirectory(folder / "runs" / "run")
    checkpoint = directory.checkpoint()
    assert checkpoint is not None
    history = simulated(folder, directory.spec())
    for leaf_name, leaf in checkpoint.params().items():
        assert torch.equal(leaf, history.params[leaf_name])
    logged = [record._replace(seconds=0) for record in directory.records()]
    assert logged == [record._replace(seconds=0) for record in history.records]


def test_killed_node_and_killed_server_come_back_and_nothing_is_lost(folder: Path) -> None:
    port, log = str(free_port()), folder / "server.log"
    server = ["server", "run.toml", "--clients", "2", "--port", port, "--deadline", "30"]
    subprocess.run(
        [sys.executable, "-m", "fedzmg", "deploy", "keys", "--devices", "2"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip

    def client(number: int) -> Any:
        own = ["--server", f"127.0.0.1:{port}", "--data", "own_task.py:task"]
        return started(folder, f"client-{number}", "client", *own, "--partition", str(number))

    def nodes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = read_json(folder / "runs" / "run" / NODES)["nodes"]
        return found

    with client(0):
        with started(folder, "server", *server) as process, client(1) as victim:
            wait_for(lambda: rounds(folder) >= 2, process, log)
            before = nodes()[1]["rounds"]
            kill(victim.pid)
            # The round continues without it, from the deadline on.
            wait_for(lambda: rounds(folder) >= 4, process, log)
            with client(1):
                wait_for(lambda: nodes()[1]["rounds"] > before + 1, process, log)
                kill(process.pid)
        done = rounds(folder)
        with client(1), started(folder, "server", *server) as process:
            assert process.wait(LONGEST) == 0, log.read_text()[-2000:]
        assert done < 10
    directory = RunDirectory(folder / "runs" / "run")
    assert [record.round for record in directory.records()] == list(range(1, 11))
    assert [node["lost"] for node in nodes()] == [0, 0]
    assert nodes()[1]["absent"] >= 1


def test_only_registered_keys_and_calls_of_devices_pass_the_gate(folder: Path) -> None:
    import httpx

    port, log = free_port(), folder / "server.log"
    for name in ("keys", "other"):
        subprocess.run(
            [sys.executable, "-m", "fedzmg", "deploy", "keys", "--devices", "2", "--out", name],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    shutil.copy(folder / "keys" / "ca.crt", folder / "other" / "ca.crt")
    server = ["server", "run.toml", "--clients", "2", "--port", str(port)]
    own = ["--server", f"127.0.0.1:{port}", "--data", "own_task.py:task", "--partition", "1"]
    with started(folder, "server", *server) as process:
        wait_for(lambda: "clients are known" in log.read_text(), process, log)
        trusted = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted) as web:
            assert web.post("/v1/control/register-node", content=b"").status_code == 404
            assert web.post("/v1/runtime/pull-task-input", content=b"").status_code == 404
            assert web.post("/v1/fleet/push-object", content=bytes(1 << 23)).status_code == 413
            assert web.post("/v1/fleet/pull-messages", content=b"").status_code >= 400
        with started(folder, "stranger", "client", *own, "--keys", "other") as stranger:
            words = folder / "stranger.log"
            wait_for(lambda: "trying again" in words.read_text(), stranger, words)
        assert "client 1" not in log.read_text()
        facts = json.loads((folder / "runs" / "run.deploy" / "settings.json").read_text())
        assert sorted(facts["bound"].values()) == [0, 1]


HUGE = """
import own_task
from fedzmg.deploy import device
from fedzmg.deploy.frames import Wire

task, train = own_task.task, device.Device._train

def huge(self, path, frame):
    reply = train(self, path, frame)
    more = {"0.more": Wire("int8", (1 << 31,), bytes(1 << 31))}
    return reply._replace(arrays={**reply.arrays, **more})

device.Device._train = huge
"""


def test_answer_of_two_gibibytes_is_refused_at_the_gate_and_every_round_continues(
    folder: Path,
) -> None:
    (folder / "huge.py").write_text(HUGE)
    port, log = str(free_port()), folder / "server.log"
    server = ["server", "run.toml", "--clients", "2", "--port", port]
    server += ["--deadline", "600", "--set", "protocol.rounds=2"]
    own = ["client", "--server", f"127.0.0.1:{port}", "--data"]
    subprocess.run(
        [sys.executable, "-m", "fedzmg", "deploy", "keys", "--devices", "2"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    sizes = []
    with (
        started(folder, "honest", *own, "own_task.py:task", "--partition", "0"),
        started(folder, "huge", *own, "huge.py:task", "--partition", "1"),
        started(folder, "server", *server) as process,
    ):
        wait_for(lambda: "clients are known" in log.read_text(), process, log)
        gate = psutil.Process(process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.poll() is None:
                sizes.append(gate.memory_info().rss)
                time.sleep(0.1)
        assert process.wait(LONGEST) == 0, log.read_text()[-2000:]
    nodes = read_json(folder / "runs" / "run" / NODES)["nodes"]
    keys = ("rounds", "absent", "refused")
    assert [[node[key] for key in keys] for node in nodes] == [[2, 0, 0], [0, 2, 2]]
    assert log.read_text().count("answer of client 1 refused") == 2
    assert max(sizes) - sizes[0] < 64 << 20


def test_commands_of_the_page_run_as_printed(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    [run] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "run.toml").write_text(run)
    port = str(free_port())
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line.strip().replace("8443", port) for block in blocks for line in block.splitlines()]
    waiting = []
    with contextlib.ExitStack() as stack:
        for i, line in enumerate(line for line in lines if line.startswith("fedzmg")):
            first, *command = shlex.split(line)[1:]
            if first == "deploy" and command[0] in ("server", "client"):
                waiting.append(stack.enter_context(started(tmp_path, f"{i}", *command)))
                continue
            done = subprocess.run(
                [sys.executable, "-m", "fedzmg", first, *command],
                cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
        assert waiting[0].wait(LONGEST) == 0
    assert len(waiting) == 3
    assert (tmp_path / "report" / "report.html").exists() or list(tmp_path.rglob("report.html"))


def test_secure_aggregation_of_flower_still_needs_its_older_interface() -> None:
    from flwr.app import Context, RecordDict
    from flwr.server.workflow import SecAggPlusWorkflow

    context = Context(0, 0, {}, RecordDict(), {})
    with pytest.raises(TypeError, match="LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, context)  # type: ignore[arg-type]
