"""Origin of a results file: version, commit and command."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fedzmg.version import __version__

if TYPE_CHECKING:
    import torch

PYTHON = "Python"  # command of results that another program made


def provenance() -> dict[str, Any]:
    """Describe the program that writes a file."""
    return {"fedzmg": __version__, **_commit(), "command": command(sys.argv)}


def environment(device: "torch.device") -> dict[str, Any]:
    """Describe machine, versions, commit and date of a measurement."""
    import torch

    on_gpu, cpu = device.type == "cuda", f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "machine": torch.cuda.get_device_name(device) if on_gpu else cpu,
        "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(),
    }  # fmt: skip


def command(arguments: Sequence[str]) -> str:
    """Return the command line as typed; ``Python`` if another program called."""
    program = PurePath(arguments[0]) if arguments else PurePath()
    if program.stem == "fedzmg" or program.parts[-2:] == ("fedzmg", "__main__.py"):
        return shlex.join(["fedzmg", *arguments[1:]])
    return PYTHON


def _commit() -> dict[str, Any]:
    """Return the commit of the source tree, if the package runs from one."""

    def git(*arguments: str) -> str:
        # Without this option, status locks the index, and a killed one leaves the lock behind.
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # Another checkout may contain the environment in which this package is installed.
        git("ls-files", "--error-unmatch", __file__)
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
