"""Atomic files and append-only logs."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from fedzmg.errors import InputError

LEFTOVER_SECONDS = 60.0
"""Age at which a temporary file has no writer any more, without a lock that says so."""


def folder_name(name: str) -> str:
    """Turn an algorithm's name into a portable directory name.

    >>> folder_name("fedzmg:as printed")
    'fedzmg-as-printed'
    """
    return name.replace(":", "-").replace(" ", "-")


def log_bytes(path: Path) -> bytes:
    """Read a log, plain or compressed as ``NAME.gz``; a missing log is empty."""
    packed = compressed(path)
    try:
        if path.exists():
            return path.read_bytes()
        return gzip.decompress(packed.read_bytes()) if packed.exists() else b""
    except (OSError, EOFError, zlib.error) as error:
        where = path if path.exists() else packed
        raise InputError(f"{where} cannot be read ({error}): restore or remove it") from None


def compressed(path: Path) -> Path:
    """Return the name of a log in a kept copy."""
    return path.with_name(f"{path.name}.gz")


def append(path: Path, lines: bytes) -> None:
    """Append lines to a log durably, after a line that a crash cut off."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that is either complete or absent, also after a power loss."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` when the block ends without an error.

    The old file is renamed to ``keep``. A crash between the two renames leaves only this one.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    remove_leftovers(path.parent, path.name, seconds=LEFTOVER_SECONDS)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def remove_leftovers(directory: Path, *names: str, seconds: float = 0.0) -> None:
    """Remove temporary files that killed processes left in a directory.

    ``names`` are the files that they wrote; without names, all leftovers are removed from a
    directory that is certainly ours. Without a lock, ``seconds`` is the age at which a file has no
    writer any more.
    """
    written = "|".join(map(re.escape, names)) or ".+"
    own = "" if names else r"|\.tmp\w{6}"  # of safetensors
    pattern = re.compile(rf"\.({written})\.[0-9a-f]{{8}}{own}")
    with contextlib.suppress(OSError):
        for found in filter(lambda path: pattern.fullmatch(path.name), directory.iterdir()):
            if time.time() - found.lstat().st_mtime >= seconds:
                found.unlink()


def sync_directory(path: Path) -> None:
    """Make a rename survive a power loss, if the system can sync directories."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
