"""Where a file of results comes from: version, commit and command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from fedzmg.version import __version__

PYTHON = "Python"
"""In the place of a command, where a program called."""


def provenance() -> dict[str, Any]:
    """What made the file that this goes into."""
    return {"fedzmg": __version__, **_commit(), "command": command(sys.argv)}


def command(arguments: Sequence[str]) -> str:
    """What a user typed, as a shell reads it; ``Python`` if another program called.

    >>> command(["/usr/bin/fedzmg", "run", "digits", "--out", "my runs"]), command(["train.py"])
    ("fedzmg run digits --out 'my runs'", 'Python')
    """
    program = PurePath(arguments[0]) if arguments else PurePath()
    if program.stem == "fedzmg" or program.parts[-2:] == ("fedzmg", "__main__.py"):
        return shlex.join(["fedzmg", *arguments[1:]])
    return PYTHON


def _commit() -> dict[str, Any]:
    """Commit of the source tree, if the package runs from one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # A checkout that merely contains the environment says nothing about this package.
    if git("ls-files", "--error-unmatch", __file__) is None:
        return {"commit": None, "dirty": None}
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
