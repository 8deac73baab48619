"""The most memory of the host that this process has held."""

from __future__ import annotations

import contextlib
import platform
import resource
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def host_peak_mib() -> float:
    """Highest resident size so far, in MiB.

    On Linux from the process's own status: what the kernel answers to ``getrusage`` starts with
    the peak of the process that started this one, and so says nothing of a child of a large parent.
    """
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    # Linux counts in KiB, macOS in bytes.
    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def reset_host_peak() -> None:
    """Let the peak start again from what is held now, where the system can."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
