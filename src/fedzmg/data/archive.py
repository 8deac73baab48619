"""Unpack zip and tar archives and single compressed files that may be hostile.

Members cannot leave the folder, only regular files are unpacked, and their number and size are
bounded. The first bytes of a file tell its kind.
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fedzmg.data.cache import SILENT, Progress, writing
from fedzmg.data.formats.common import reading

MOST_MEMBERS = 100_000
MOST_BYTES = 2**33

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x5d\x00\x00": lzma.open,
}


def extract(
    archive: Path, into: Path, wanted: Sequence[str], progress: Progress = SILENT
) -> list[Path]:
    """Unpack an archive, or a single compressed file, into a new folder; return the files, sorted.

    ``wanted`` are patterns for the names of members without folders.
    """
    count = total = 0

    def fits(size: int, name: str) -> bool:
        """Count a member; return whether it is wanted."""
        nonlocal count, total
        count, total = count + 1, total + size
        if count > MOST_MEMBERS or total > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes or {MOST_MEMBERS} members")
        progress.advance(file.tell())
        base = PurePosixPath(name).name.lower()
        # Some systems leave files behind whose names begin with a dot.
        return base[:1] != "." and any(fnmatch.fnmatchcase(base, p.lower()) for p in wanted)

    damaged = reading(str(archive), "it is damaged, unsafe or not an archive; get it again")
    with damaged, archive.open("rb") as file, writing(into):
        into.mkdir(parents=True)
        progress.begin(f"unpacking {archive.name}", archive.stat().st_size)
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(file) as packed:
                for info in packed.infolist():
                    if fits(info.file_size, info.filename) and not info.is_dir():
                        packed.extract(info, into)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(fileobj=file) as bundle:
                for member in bundle:
                    if fits(member.size, member.name) and member.isreg():
                        bundle.extract(member, into, filter="data")
                # The checksum of a compressed file is at its end.
                while bundle.fileobj is not None and bundle.fileobj.read(2**18):
                    pass
        else:
            head = file.read(8)
            file.seek(0)
            [opener] = [opener for magic, opener in _OPENERS.items() if head.startswith(magic)]
            with opener(file) as stream, (into / archive.stem).open("xb") as target:
                while chunk := stream.read(2**18):
                    fits(len(chunk), archive.stem)
                    target.write(chunk)
    return sorted(path for path in into.rglob("*") if path.is_file())


def is_archive(path: Path) -> bool:
    """Tell whether a file is a zip or a tar."""
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except Exception:
        return False
