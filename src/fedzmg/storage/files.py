"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from pathlib import Path

from fedzmg.errors import InputError


def folder_name(name: str) -> str:
    """The directory of an algorithm; a colon is no file name everywhere, a blank a nuisance.

    >>> folder_name("fedzmg:as printed")
    'fedzmg-as-printed'
    """
    return name.replace(":", "-").replace(" ", "-")


def log_bytes(path: Path) -> bytes:
    """What a log holds, plain or compressed as ``NAME.gz``; nothing if it does not exist.

    Raises:
        InputError: if it cannot be read.
    """
    packed = compressed(path)
    try:
        if path.exists():
            return path.read_bytes()
        return gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    except (OSError, EOFError, zlib.error) as error:
        where = path if path.exists() else packed
        raise InputError(f"{where} cannot be read ({error}): restore or remove it") from None


def compressed(path: Path) -> Path:
    """Where a log is found in a copy that was made for keeping."""
    return path.with_name(f"{path.name}.gz")


def append(path: Path, lines: bytes) -> None:
    """Add lines to a log for good; a line that a crash broke off is left behind them."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


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
