"""Atomic files and append-only logs."""

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fedzmg.errors import InputError
from fedzmg.storage.reading import read_file, read_gzip

BLOCK = 1 << 20
UNSEALED = {"sha256": "0" * 64}  # field of a safetensors header, replaced by the hash
LEFTOVER_SECONDS = 60.0  # age at which a temporary file surely has no writer any more
fences: list[Callable[[Path], None]] = []  # checks before every write; an error forbids it


def check_fences(path: Path) -> None:
    """Check that no other process has taken over the directory of a file."""
    for check in fences:
        check(path)


def folder_name(name: str) -> str:
    """Turn an algorithm's name into a portable directory name."""
    return name.replace(":", "-").replace(" ", "-")


def log_bytes(path: Path) -> bytes:
    """Read a log, plain or compressed as ``NAME.gz``; a missing log is empty."""
    where, read = (path, read_file) if path.exists() else (compressed(path), read_gzip)
    try:
        return read(where) if where.exists() else b""
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{where} cannot be read ({error}): restore or remove it") from None


def compressed(path: Path) -> Path:
    """Return the name of a log in a kept copy."""
    return path.with_name(f"{path.name}.gz")


def log_marks(directory: Path, *names: str) -> dict[str, str]:
    """Return size and SHA-256 of logs as they are now, and make that part survive a power loss."""
    for name in names:
        sync(directory / name)
    contents = {name: log_bytes(directory / name) for name in names}
    return {name: f"{len(c)} {hashlib.sha256(c).hexdigest()}" for name, c in contents.items()}


def changed_log(directory: Path, marks: Mapping[str, str], *, grown: bool = True) -> str:
    """Return a log that does not begin with what was marked, or that has grown; empty: none."""
    for name, mark in marks.items():
        size, _, digest = mark.partition(" ")
        content = log_bytes(directory / name)
        start = content[: int(size)] if grown else content
        if len(start) != int(size) or hashlib.sha256(start).hexdigest() != digest:
            return name
    return ""


def append(path: Path, lines: bytes) -> None:
    """Append lines to a log, after a line that a crash cut off.

    They survive a crash of this process. To make every line survive a power loss would take longer
    than a round; :func:`sync` does so before anything relies on them.
    """
    check_fences(path)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                lines = b"\n" + lines
        file.write(lines)


def sync(path: Path) -> None:
    """Make what a file holds survive a power loss; a missing one is left alone."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming_errors(path: Path | str, remedy: str) -> Iterator[None]:
    """Turn errors of the operating system into one line with a path."""
    try:
        yield
    except OSError as error:
        # Of a parser, or of a user's own model, loss or metric.
        if error.errno is None or hasattr(error, "__notes__"):
            raise
        raise InputError(f"cannot write {path}: {error.strerror}; {remedy}") from None


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that is either complete or absent, also after a power loss."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path``, whose old content becomes ``keep``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    remove_leftovers(path.parent, path.name, seconds=LEFTOVER_SECONDS)
    try:
        yield temporary
        sync(temporary)
        check_fences(path)
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def seal(path: Path) -> None:
    """Write the hash of a safetensors file into its header, which has the field ``UNSEALED``."""
    with path.open("rb+") as file:
        start, _, digest = _digest(file)
        file.seek(start)
        file.write(digest)


def has_seal(path: Path) -> bool:
    """Check the hash in the header of a safetensors file."""
    with path.open("rb") as file:
        _, stored, digest = _digest(file)
    return stored == digest


def _digest(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Return the offset of the hash, the stored hash and that of the file with the placeholder."""
    blank = UNSEALED["sha256"].encode()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        key = b'"sha256":"'
        start = content.find(key) + len(key)
        end = start + len(blank)
        with memoryview(content) as view:
            digest = hashlib.sha256(view[:start])
            digest.update(blank)
            digest.update(view[end:])
        return start, content[start:end], digest.hexdigest().encode()


def renew(path: Path) -> None:
    """Replace a file by a copy, so that a process that has it open changes it no longer."""
    with replacing(path) as fresh, path.open("rb") as old, fresh.open("wb") as new:
        while block := old.read(BLOCK):
            if block.strip(b"\0"):
                new.write(block)
            else:  # stays a hole in a sparse file
                new.seek(len(block), os.SEEK_CUR)
        new.truncate(old.tell())


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
