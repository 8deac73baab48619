"""Read a file in a process of its own, where a crash, a hang or a huge allocation is an answer."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import subprocess
import sys
import traceback
import types
from pathlib import Path

SECONDS = 20
ROOM = 2**29


class Apart:
    """A child process that reads one file after the other; it is started anew when it died."""

    def __init__(self, package: Path, reader: str) -> None:
        self.command = [sys.executable, __file__, str(package), reader]
        self.child: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> str:
        """Return ``ok``, ``refused: ...``, or the failure."""
        if self.child is None:
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(f"{path}\n")
        self.child.stdin.flush()
        ready, _, _ = select.select([self.child.stdout], [], [], SECONDS)
        answer = self.child.stdout.readline().strip() if ready else "no answer in time"
        if not ready or not answer:
            answer = answer or f"crashed, exit code {self.child.wait(SECONDS)}"
            self.close()
        return answer

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


def serve(package: str, reader: str) -> None:
    """Read the files named on standard input, in the child."""
    import resource

    # The readers alone: a whole package with its models takes seconds to import.
    for name in ("fedzmg", "fedzmg.data"):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(package, *name.split(".")[1:]))]
        sys.modules[name] = module
    module, _, function = reader.partition(".")
    read = getattr(importlib.import_module(f"fedzmg.data.formats.{module}"), function)
    refused = importlib.import_module("fedzmg.errors").InputError
    with contextlib.suppress(OSError):  # what is mapped so far, and some room; Linux only
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        try:
            read([Path(line.rstrip("\n"))])
            answer = "ok"
        except refused as error:
            answer = f"refused: {error}"
            if "not enough memory" in answer:
                answer = "asked for too much memory"
            if "\n" in answer:
                answer = f"more than one line: {answer!r}"
        except BaseException:
            answer = f"escaped: {traceback.format_exc()!r}"
        print(answer, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
