"""Unpack zip and tar archives and single compressed files that may be hostile.

Members cannot leave the folder, only regular files are unpacked, and their number and size are
bounded. The first bytes of a file tell its kind.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import lzma
import shutil
import tarfile
import uuid
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fedzmg.data.cache import SILENT, Progress, writing
from fedzmg.errors import InputError

MOST_MEMBERS = 100_000

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x5d\x00\x00": lzma.open,
}


def extract(
    archive: Path,
    into: Path,
    *,
    wanted: Sequence[str] | None = None,
    max_bytes: int,
    progress: Progress = SILENT,
) -> list[Path]:
    """Unpack an archive, or a single compressed file, into a new folder.

    Args:
        archive: zip, tar (also compressed), or one file as gz, bz2, xz or lzma.
        into: a folder that does not exist yet; it appears when all is unpacked.
        wanted: patterns for the names of members without folders; None for all.
        max_bytes: bound on the unpacked size of all members.
        progress: receives progress updates.

    Returns:
        The files, sorted.
    """
    if not archive.is_file():
        raise InputError(f"{archive}: there is no such file")
    if into.exists():
        raise InputError(f"{into} exists: unpack into a new folder")
    temporary = into.parent / f".{into.name}.{uuid.uuid4().hex[:8]}"
    try:
        with writing(into):
            temporary.mkdir(parents=True)
            with archive.open("rb") as file:
                progress.begin(f"unpacking {archive.name}", archive.stat().st_size)
                _unpack(archive, file, temporary, wanted, max_bytes, progress)
            temporary.rename(into)
    except InputError:
        raise
    except Exception as error:  # the libraries raise anything on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{archive} is cut off, damaged or unsafe ({reason}): get it again or give another file"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path for path in into.rglob("*") if path.is_file())


def is_archive(path: Path) -> bool:
    """Tell whether a file is a zip or a tar."""
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except Exception:
        return False


def _unpack(
    archive: Path,
    file: IO[bytes],
    folder: Path,
    wanted: Sequence[str] | None,
    max_bytes: int,
    progress: Progress,
) -> None:
    count = total = 0

    def add(size: int, members: int = 1) -> None:
        nonlocal count, total
        count, total = count + members, total + size
        if count > MOST_MEMBERS or total > max_bytes:
            raise InputError(
                f"{archive} unpacks to more than {max_bytes} bytes or {MOST_MEMBERS} members"
            )

    head = file.read(8)
    file.seek(0)
    if head.startswith(b"PK"):
        with zipfile.ZipFile(file) as packed:
            for info in packed.infolist():
                add(info.file_size)
                if not info.is_dir() and _is_wanted(info.filename, wanted):
                    packed.extract(info, folder)
                    progress.advance(file.tell())
    elif is_archive(archive):
        with tarfile.open(fileobj=file) as bundle:
            for member in bundle:
                add(member.size)
                if member.isreg() and _is_wanted(member.name, wanted):
                    bundle.extract(member, folder, filter="data")
                    progress.advance(file.tell())
            # The checksum of a compressed file is at its end.
            while bundle.fileobj is not None and bundle.fileobj.read(2**18):
                pass
    else:
        opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), None)
        if opener is None:
            raise InputError(f"{archive} is not a zip, tar, gz, bz2, xz or lzma file")
        name = archive.stem if archive.suffix else f"{archive.name}.unpacked"
        with opener(file) as stream, (folder / name).open("xb") as target:
            while chunk := stream.read(2**18):
                add(len(chunk), 0)
                target.write(chunk)
                progress.advance(file.tell())


def _is_wanted(name: str, wanted: Sequence[str] | None) -> bool:
    base = PurePosixPath(name).name.lower()
    # Some systems leave files behind whose names begin with a dot.
    return wanted is None or (
        base[:1] != "." and any(fnmatch.fnmatchcase(base, pattern.lower()) for pattern in wanted)
    )
