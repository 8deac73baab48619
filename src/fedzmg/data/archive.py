"""Unpack zip and tar archives and single compressed files without trusting them.

What kind of file it is, its first bytes say. A member that would land outside of the folder, a
link or a device is refused by name, and unpacking stops at a bound instead of filling the disk.
"""

from __future__ import annotations

import bz2
import contextlib
import fnmatch
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from fedzmg.data.cache import writing
from fedzmg.data.fetch import SILENT, Progress
from fedzmg.errors import InputError

MOST_MEMBERS = 100_000

_CHUNK = 2**18
_BETWEEN = 2**20
"""More than the headers between two members of a tar ever take."""

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x5d\x00\x00": lzma.open,
}
_DAMAGE = (
    EOFError,
    OSError,
    RuntimeError,
    NotImplementedError,
    ValueError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    OverflowError,
)


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
        into: a folder that is not there yet; it appears when all of it is unpacked.
        wanted: patterns for the names of members without folders; None for all.
        max_bytes: the most that may come out, of one member and in all.
        progress: told how far it is.

    Returns:
        The files, sorted.

    Raises:
        InputError: if it is damaged, dangerous, too large, or the disk is full.
    """
    if not archive.is_file():
        raise InputError(f"{archive}: there is no such file")
    if into.exists():
        raise InputError(f"{into} is there already: unpack into a new folder")
    temporary = into.parent / f".{into.name}.{uuid.uuid4().hex[:8]}"
    with writing(temporary):
        temporary.mkdir(parents=True)
    try:
        with _damage(archive):
            for name, stream in _members(archive, wanted, max_bytes, progress):
                _write(stream, temporary.joinpath(*_parts(name)), archive, name)
        with writing(into):
            temporary.rename(into)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sorted(path for path in into.rglob("*") if path.is_file())


def is_archive(path: Path) -> bool:
    """Whether a file holds members (zip or tar), so that it must be unpacked to be read."""
    try:
        with path.open("rb") as file:
            if _is_zip(file):
                return True
            with _decompressed(file) as stream:
                return _is_tar(stream.read(512))
    except _DAMAGE:
        return False


def _is_zip(file: IO[bytes]) -> bool:
    head = file.read(4)
    file.seek(0)
    return head in (b"PK\x03\x04", b"PK\x05\x06")


def _is_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


@contextlib.contextmanager
def _decompressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The contents of a compressed file, or the file itself."""
    head = file.read(8)
    file.seek(0)
    opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), None)
    if opener is None:
        yield file
        return
    with opener(file) as stream:
        yield stream


@contextlib.contextmanager
def _damage(archive: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{archive} is cut off or damaged ({reason}): get it again or give another file"
        ) from None


class _Meter(io.RawIOBase):
    """A stream of which only so much may be read before the next allowance."""

    def __init__(self, stream: IO[bytes], exceeded: InputError) -> None:
        super().__init__()
        self._stream, self._exceeded = stream, exceeded
        self.allowed = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, _CHUNK) if size >= 0 else _CHUNK)
        self.allowed -= len(data)
        if self.allowed < 0:
            raise self._exceeded
        return data


def _members(
    archive: Path, wanted: Sequence[str] | None, max_bytes: int, progress: Progress
) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of what is wanted, in order; every name is checked."""
    exceeded = InputError(
        f"{archive} unpacks to more than {max_bytes // 2**20} MiB, which is not plausible for it: "
        "get it again from its official place"
    )
    with archive.open("rb") as file:
        if _is_zip(file):
            yield from _zip_members(archive, file, wanted, max_bytes, exceeded, progress)
            return
        _follow(progress, archive, file)
        with _decompressed(file) as stream:
            head = stream.read(512)
            packed = stream is not file
            if not packed and not _is_tar(head):
                raise InputError(f"{archive} is no zip, tar, gz, bz2, xz or lzma file")
            stream.seek(0)
            meter = _Meter(stream, exceeded)
            if _is_tar(head):
                yield from _tar_members(archive, meter, wanted, max_bytes, exceeded, file, progress)
            else:
                meter.allowed = max_bytes
                name = archive.stem if archive.suffix else f"{archive.name}.unpacked"
                yield name, cast("IO[bytes]", _Told(meter, file, progress))


def _zip_members(
    archive: Path,
    file: IO[bytes],
    wanted: Sequence[str] | None,
    max_bytes: int,
    exceeded: InputError,
    progress: Progress,
) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(file) as box:
        infos = box.infolist()
        _check_count(archive, len(infos))
        for info in infos:
            _check_name(archive, info.orig_filename)
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refusal(archive, info.filename, "is a link or a device")
        chosen = [i for i in infos if not i.is_dir() and _is_wanted(i.filename, wanted)]
        left = max_bytes
        if sum(info.file_size for info in chosen) > left:
            raise exceeded
        _follow(progress, archive, file)
        for info in chosen:
            with box.open(info) as member:
                meter = _Meter(member, exceeded)
                meter.allowed = left
                yield info.filename, cast("IO[bytes]", _Told(meter, file, progress))
                left = meter.allowed


def _tar_members(
    archive: Path,
    meter: _Meter,
    wanted: Sequence[str] | None,
    max_bytes: int,
    exceeded: InputError,
    file: IO[bytes],
    progress: Progress,
) -> Iterator[tuple[str, IO[bytes]]]:
    # Each allowance covers one header or one member, so that a header that claims to be endless
    # is not read into memory.
    left, count = max_bytes, 0
    meter.allowed = _BETWEEN
    with tarfile.open(fileobj=cast("IO[bytes]", meter), mode="r|") as box:
        while (member := box.next()) is not None:
            count += 1
            _check_count(archive, count)
            _check_name(archive, member.name)
            if not (member.isreg() or member.isdir()):
                raise _refusal(archive, member.name, "is a link or a device")
            left -= member.size
            if left < 0:
                raise exceeded
            meter.allowed = member.size + _BETWEEN
            content = box.extractfile(member) if member.isreg() else None
            if content is not None:
                if _is_wanted(member.name, wanted):
                    yield member.name, cast("IO[bytes]", _Told(content, file, progress))
                while content.read(_CHUNK):
                    pass
            meter.allowed = _BETWEEN
    meter.allowed = max_bytes
    while meter.read(_CHUNK):  # to the end, where a compressed file has its check sum
        pass


class _Told:
    """A stream that tells how far the archive around it has been read."""

    def __init__(self, stream: Any, file: IO[bytes], progress: Progress) -> None:
        self._stream, self._file, self._progress = stream, file, progress

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._progress.advance(self._file.tell())
        return data


def _follow(progress: Progress, archive: Path, file: IO[bytes]) -> None:
    progress.begin(f"unpacking {archive.name}", os.fstat(file.fileno()).st_size)


def _is_wanted(name: str, wanted: Sequence[str] | None) -> bool:
    if not _parts(name):
        return False
    if wanted is None:
        return True
    base = _parts(name)[-1]
    # Names that begin with a dot are leftovers of some systems, not the files they resemble.
    return not base.startswith(".") and any(
        fnmatch.fnmatchcase(base.lower(), pattern.lower()) for pattern in wanted
    )


def _parts(name: str) -> list[str]:
    """The folders and the name of a member, whichever way the slashes lean."""
    return [part for part in re.split(r"[/\\]", name) if part not in ("", ".")]


def _check_name(archive: Path, name: str) -> None:
    if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        raise _refusal(archive, name, "is an absolute path")
    if ".." in _parts(name):
        raise _refusal(archive, name, "climbs out of the folder")
    if "\x00" in name:
        raise _refusal(archive, name, "is no name for a file")


def _check_count(archive: Path, count: int) -> None:
    if count > MOST_MEMBERS:
        raise InputError(
            f"{archive} holds more than {MOST_MEMBERS} members, which is not plausible for it: get "
            "it again from its official place"
        )


def _refusal(archive: Path, name: str, why: str) -> InputError:
    return InputError(
        f"{archive}: member {name!r} {why}; nothing was unpacked: get the archive again from its "
        "official place"
    )


def _write(stream: IO[bytes], path: Path, archive: Path, name: str) -> None:
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        except (FileExistsError, NotADirectoryError):
            raise _refusal(archive, name, "occurs twice") from None
    with file:
        while chunk := stream.read(_CHUNK):
            with writing(path, len(chunk)):
                file.write(chunk)
        with writing(path):
            file.flush()
