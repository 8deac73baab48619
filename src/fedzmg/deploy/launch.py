"""Start a server, a device, or a whole federation on one machine."""

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import psutil
import torch

from fedzmg.deploy.blueprint import Blueprint
from fedzmg.deploy.device import Device, serve
from fedzmg.deploy.gate import open_gate
from fedzmg.deploy.processes import APP, Flower, free_port, stop, superlink, supernode, unreachable
from fedzmg.deploy.server import CUT, DONE, LOG, PID, SETTINGS, Settings, prepare
from fedzmg.errors import InputError
from fedzmg.experiment.specs.run import RunSpec
from fedzmg.storage.formats import read_json, write_json
from fedzmg.storage.lock import hold
from fedzmg.tree import num_bytes

Say = Callable[[str], None]
RETRY_SECONDS = 5.0
START_SECONDS = 180.0  # time for a server app to start: Flower does not report its reason to end
MOST_RESTARTS = 20  # restarts of a server app that ends without a result, such as a killed one


def run_server(
    spec: RunSpec, settings: Settings, host: str, port: int, keys: Path | None, say: Say
) -> None:
    """Run a server until its training has ended.

    The key ``device-3`` may only be client 3. A server app that is killed is started again and
    continues from its last checkpoint.
    """
    # Leave by an exception when a service manager stops this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    task, run = prepare(spec, spec.build_task(), settings.clients)
    most = 4 * num_bytes(Blueprint.of(task, run.spec, torch.device("cpu")).up) + (1 << 20)
    home, inner = Path(settings.home), free_port()
    flower = Flower(home, **{SETTINGS: str(home / "settings.json")})
    with (
        hold([home], say),
        superlink(flower, inner, keys) as nodes,
        (home / LOG).open("w+") as log,
    ):
        (home / "app").mkdir(exist_ok=True)
        shutil.copy(APP, home / "app" / "pyproject.toml")
        for name in (DONE, CUT):
            (home / name).unlink(missing_ok=True)
        named = {node: re.fullmatch(r"device-(\d+)", key) for node, key in nodes.items()}
        bound = {node: int(found[1]) for node, found in named.items() if found}
        own = settings._replace(spec=run.spec.to_toml(), bound=bound, parent=os.getpid())
        write_json(home / "settings.json", own._asdict())
        with open_gate(inner, host, port, most, keys, home / CUT) as counted:
            say(f"listening on {host}:{port}, {'TLS' if keys else 'plain text'}")
            _follow(flower, log, say)
            up, down = (counted[way] / 1e6 for way in ("up", "down"))
            say(f"{down:.2f} MB went to devices, {up:.2f} MB came from them")


def _follow(flower: Flower, log: Iterable[str], say: Say) -> None:
    """Start the server app, show its log, and start it again when it ends without a result."""
    home = flower.home
    for attempt in range(MOST_RESTARTS):
        if attempt:
            say("the server app has ended: starting it again")
        (home / PID).unlink(missing_ok=True)
        run = flower.call("run", str(home / "app"), "here")["run-id"]
        app, late = None, time.monotonic() + START_SECONDS
        while app is None or _is_alive(app):
            time.sleep(0.2)
            if app is None and (home / PID).exists():
                app = int((home / PID).read_text())
            if app is None and time.monotonic() > late:
                raise InputError(f"the server app does not start: {flower.log_of(run)}")
            for line in log:
                say(line.rstrip("\n"))
            if (home / DONE).exists():
                if error := read_json(home / DONE)["error"]:
                    raise InputError(str(error))
                return
    raise InputError(f"the server app ends again and again: see {home / 'superlink.log'}")


def _is_alive(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def run_client(
    data: str, client: int, server: str, state: Path, keys: tuple[Path, Path] | None, say: Say,
    device: torch.device,
) -> None:  # fmt: skip
    """Run a device for ever: a worker that trains, and a SuperNode that is started again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as a server does
    for file in keys or ():
        if not file.is_file():
            raise InputError(f"{file} is missing: copy it from the server's 'fedzmg deploy keys'")
    own = Device(data, client, state, device)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    flower = Flower(state / "flower")
    with (
        hold([state], say),
        tempfile.TemporaryDirectory(prefix="fedzmg-") as folder,  # a socket's path must be short
        Listener(f"{folder}/worker") as listener,
    ):
        worker = threading.Thread(target=serve, args=(listener, own, say), daemon=True)
        worker.start()
        said = ""
        while worker.is_alive():
            reason = unreachable(server)
            if not reason:
                process = supernode(flower, server, f"{folder}/worker", keys)
                say(f"client {client}: connecting to {server}")
                try:
                    process.wait()
                finally:
                    stop(process)
                reason = f"disconnected: {flower.tail('supernode.log')}"
            if reason != said:
                said = reason
                say(f"client {client}: {reason}; trying again")
            time.sleep(RETRY_SECONDS)


@contextlib.contextmanager
def local_clients(
    data: str, clients: int, server: str, home: Path, keys: Path | None, plugins: tuple[str, ...]
) -> Iterator[None]:
    """Run devices as processes of this machine, each with its own state and log."""
    started = []
    try:
        for number in range(clients):
            state = home / f"client-{number}"
            command = [sys.executable, "-m", "fedzmg", "deploy", "client", "--server", server]
            command += ["--data", data, "--partition", str(number), "--state", str(state)]
            command += ["--keys", str(keys)] if keys else ["--insecure"]
            command += [word for file in plugins for word in ("--plugin", file)]
            started.append(Flower(state).start(*command, log="client.log"))
        yield
    finally:
        stop(*started)
