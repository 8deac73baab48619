"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Write a file so that it is there whole or not at all, also after a power loss.

    Args:
        path: the file.
        content: what is to be in it.
        keep: move what the file was so far to this name of the same directory. A crash between the
            two moves leaves only that one.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a run directory is as readable as any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_leftovers(path: Path) -> None:
    """Remove what a killed process left behind of writing this file."""
    for found in path.parent.iterdir():
        if is_leftover(found, path.name):
            with contextlib.suppress(OSError):
                found.unlink()


def is_leftover(found: Path, name: str) -> bool:
    """Whether a file is what :func:`write_atomic` moves to ``name`` once it is whole."""
    return found.name.startswith(f".{name}.")


def sync_directory(path: Path) -> None:
    """Make a rename survive a power loss, where the system lets directories be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
