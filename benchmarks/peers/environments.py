"""Create a virtual environment per peer from its pins, and run processes in them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "JAX_PLATFORMS": "cpu",
    "PYTHONNOUSERSITE": "1",
}


class Peer(NamedTuple):
    """Installation of a peer."""

    title: str
    module: str
    """Module of this package; ``python -m peers.MODULE WORK OUT`` trains."""
    requirements: str | None = None
    """File of pins; None to use this script's Python."""
    devices: tuple[str, ...] = ("cpu",)


PLAIN = Peer("plain loop", "plain", None, ("cpu", "cuda"))
OURS = Peer("fedzmg", "ours", None, ("cpu", "cuda"))
PEERS = {
    peer.module: peer
    for peer in (
        PLAIN,
        OURS,
        Peer("pfl-research", "pfl_research", "pfl-research.txt", ("cpu", "cuda")),
        Peer("Flower simulation", "flower", "flower.txt", ("cpu", "cuda")),
        Peer("FedJAX", "fedjax", "fedjax.txt", ("cpu", "cuda")),
    )
}


class Failed(Exception):
    """Failure to install or run a peer, in one line."""


def interpreter(peer: Peer, root: Path) -> Path:
    """Return a Python with the peer's packages, creating its environment if needed.

    Raises:
        Failed: if the pins cannot be installed.
    """
    if peer.requirements is None:
        return Path(sys.executable)
    wanted = (REQUIREMENTS / peer.requirements).read_text()
    # The torch that fedzmg runs with is the better one to compare with, whatever its version.
    if satisfied({name: version for name, version in pins(wanted).items() if name != "torch"}):
        return Path(sys.executable)
    folder = root / peer.module
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    execute([sys.executable, "-m", "venv", "--clear", str(folder)], "venv", timeout=300)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # pip takes packages on PYTHONPATH for installed ones.
    install = [*pip, "-r", str(REQUIREMENTS / peer.requirements)]
    execute(install, "pip", timeout=3600, variables={"PYTHONPATH": ""})
    stamp.write_text(wanted)
    return python


def pins(text: str) -> dict[str, str]:
    """Versions by name, of lines such as ``flwr[simulation]==1.41.0``."""
    return dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==(\S+)", text, re.MULTILINE))


def satisfied(wanted: Mapping[str, str]) -> bool:
    """Return True if this Python has exactly these versions, ignoring builds (``+cpu``)."""
    try:
        found = {name: importlib.metadata.version(name) for name in wanted}
    except importlib.metadata.PackageNotFoundError:
        return False
    return all(found[name].partition("+")[0] == version for name, version in wanted.items())


def train(
    python: Path, peer: Peer, work: Path, out: Path, *, device: str, cores: int, timeout: float
) -> None:
    """Let a peer do the work in a process of its own.

    Raises:
        Failed: if it ends with an error or takes too long.
    """
    out.mkdir(parents=True)
    path = [str(BENCHMARKS)]
    if python == Path(sys.executable) and "PYTHONPATH" in os.environ:
        path.append(os.environ["PYTHONPATH"])
    variables = {
        **QUIET,
        "OMP_NUM_THREADS": str(cores),
        "PYTHONPATH": os.pathsep.join(path),
        "FLWR_HOME": str(out / "flower"),
    }
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""  # pfl takes a GPU that it sees
    else:
        variables["JAX_PLATFORMS"] = device  # an error, not a CPU, where JAX has no GPU
    command = [str(python), "-m", f"peers.{peer.module}", str(work), str(out)]
    execute(command, peer.title, timeout=timeout, variables=variables)


def execute(
    command: Sequence[str], name: str, *, timeout: float, variables: Mapping[str, str] | None = None
) -> None:
    """Run a command; its output is only looked at if it fails."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        stdin=subprocess.DEVNULL, start_new_session=True, cwd=BENCHMARKS,
        env={**os.environ, **(variables or {})},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"{name}: still running after {timeout:.0f} s") from None
        raise
    if process.returncode:
        raise Failed(f"{name}: {reason(output)}")


def reason(output: str) -> str:
    """Return the last error of a failed command's output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"ERROR:|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["ended without a word"])[-1][:300]
