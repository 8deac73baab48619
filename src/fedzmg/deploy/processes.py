"""Flower's processes: SuperLink and SuperNode, without telemetry, update checks or installs."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import psutil

from fedzmg.errors import InputError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}  # fmt: skip
"""Environment in which Flower contacts nobody but its own server."""
APP = Path(__file__).with_name("app.toml")


def require_flower() -> None:
    """Refuse to continue without Flower."""
    if util.find_spec("flwr") is None:
        raise InputError("deploy needs Flower: pip install 'fedzmg[flower]'")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that happens."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def exit_with(parent: int) -> None:
    """End this process soon after another one has ended."""

    def watch() -> None:
        while psutil.pid_exists(parent):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Flower:
    """Environment and directory of Flower's processes on one machine."""

    def __init__(self, home: Path, **more: str) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home, scripts = home.absolute(), str(Path(sys.executable).parent)
        path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
        own = {"PATH": path, "FLWR_HOME": str(self.home)}
        self.environment = {**os.environ, **QUIET, **own, **more}

    def start(self, *command: str, log: str) -> "subprocess.Popen[bytes]":
        """Start a process in a group of its own, which ends with this one."""
        with (self.home / log).open("wb") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=self.environment, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip

    def call(self, *command: str) -> dict[str, Any]:
        """Run a command of ``flwr`` and return its JSON."""
        text = self._run(*command, "--format", "json")
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(text[text.find("{") :])
            if found.get("success", True):
                return found
        raise InputError(f"flwr {' '.join(command[:2])} failed: {_end(text)}")

    def log_of(self, run: str) -> str:
        """Return the end of a run's log in one line, for a message."""
        return _end(self._run("log", run, "here", "--show"))

    def _run(self, *command: str) -> str:
        return subprocess.run(
            ["flwr", *command], env=self.environment, cwd=self.home, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip

    def tail(self, log: str) -> str:
        """Return the end of a log in one line, for a message."""
        return _end((self.home / log).read_text(errors="replace"))


def _end(text: str) -> str:
    return " ".join(text.split())[-300:]


def stop(*processes: "subprocess.Popen[bytes]") -> None:
    """End processes and everything that they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


@contextlib.contextmanager
def superlink(flower: Flower, port: int, keys: Path | None) -> Iterator[dict[str, str]]:
    """Run a SuperLink on the loopback interface; yield the name of the key of every node.

    Without ``keys``, it speaks plain text and accepts every node.
    """
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    if keys is None:
        command += ["--insecure"]
        trust = "insecure = true"
    else:
        command += ["--enable-supernode-auth", "--ssl-ca-certfile", str(keys / "ca.crt")]
        command += ["--ssl-certfile", str(keys / "server.pem")]
        command += ["--ssl-keyfile", str(keys / "server.key")]
        trust = f"root-certificates = {json.dumps(str(keys / 'ca.crt'))}"
    known = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
    (flower.home / "config.toml").write_text(f"{known}{trust}\n")
    process = flower.start(*command, log="superlink.log")
    try:
        while unreachable(f"127.0.0.1:{port}"):
            if process.poll() is not None:
                raise InputError(f"the SuperLink has ended: {flower.tail('superlink.log')}")
            time.sleep(0.2)
        yield {
            str(flower.call("supernode", "register", str(key), "here")["node-id"]): key.stem
            for key in (sorted(keys.glob("*.pub")) if keys else [])
        }
    finally:
        stop(process)


def unreachable(server: str) -> str:
    """Return why nobody answers at HOST:PORT; empty if somebody does."""
    host, _, port = server.rpartition(":")
    if not port.isdecimal():
        raise InputError(f"server {server!r}: expected HOST or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 10).close()
    except (OSError, OverflowError) as error:
        return f"no server answers at {server} ({error})"
    return ""


def supernode(
    flower: Flower, server: str, worker: str, keys: tuple[Path, Path] | None
) -> "subprocess.Popen[bytes]":
    """Start a SuperNode, whose messages go to the worker at a Unix socket.

    ``keys`` are the CA's certificate and the private key of this device; None: plain text.
    """
    command = ["flower-supernode", "--superlink", server, "--host", "127.0.0.1"]
    command += ["--port", str(free_port()), "--node-config", f"worker={json.dumps(worker)}"]
    if keys is None:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(keys[0])]
        command += ["--auth-supernode-private-key", str(keys[1])]
    return flower.start(*command, log="supernode.log")
