"""EMNIST as NIST gives it for MATLAB: ``dataset.{train,test}.{images,labels,writers}``.

A file of MATLAB's version 5 is a header of 128 bytes and elements. An element is a type, a size
and that many bytes, maybe packed with zlib; a matrix is an element of elements. Only this one
layout is understood, and nothing is allocated that the file has not been seen to fill: general
readers of MATLAB files can be made to crash by one changed byte.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats.rows import (
    Paths,
    as_paths,
    by_writer,
    file_size,
    numbers_or_strings,
    reading,
    ungrouped,
    unpacked_bound,
)
from fedzmg.errors import InputError, unknown

_SIDE = 28
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
_STRUCT = 2
_UINT8 = 9
_NUMERIC = range(6, 16)
_KINDS = {1: "cell", 3: "object", 4: "char", 5: "sparse", 16: "function", 17: "object"}
_UNSAFE = (3, 16, 17)
_CHUNK = 2**20


class _Damaged(Exception):
    """What is wrong; whoever knows the file says where."""


class _Stream:
    """Bytes in order, unpacked on the way where need be."""

    def __init__(self, file: IO[bytes], size: int, *, packed: bool, bound: int) -> None:
        self.position = 0
        self._file = file
        self._left = size
        self._inflate = zlib.decompressobj() if packed else None
        self._bound = bound

    def read(self, size: int) -> bytes:
        """Exactly that many bytes."""
        if self.position + size > self._bound:
            raise _Damaged(f"unpacks to over {self._bound:,} bytes, as an archive bomb does")
        data = self._take(size) if self._inflate is None else self._unpack(size)
        if len(data) != size:
            raise _Damaged("ends in the middle")
        self.position += size
        return data

    def skip(self, size: int) -> None:
        """Pass bytes without keeping them."""
        while size > 0:
            size -= len(self.read(min(size, _CHUNK)))

    def finish(self) -> None:
        """Pass the rest, so that the check sum at the end of what is packed is compared."""
        while self._inflate is not None and not self._inflate.eof:
            if self.position > self._bound:
                raise _Damaged(f"unpacks to over {self._bound:,} bytes, as an archive bomb does")
            data = self._unpack(_CHUNK)
            self.position += len(data)
            if not data and not self._inflate.eof:
                raise _Damaged("ends in the middle")

    def _take(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data

    def _unpack(self, size: int) -> bytes:
        inflate = self._inflate
        assert inflate is not None
        parts, missing = [], size
        while missing and not inflate.eof:
            data = inflate.decompress(inflate.unconsumed_tail or self._take(_CHUNK), missing)
            if not data and not inflate.unconsumed_tail and self._left == 0:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)


_Images: TypeAlias = Callable[[_Stream, int], None]
"""(stream, images) -> None; reads the pixels of that many images."""


class _Tag(NamedTuple):
    kind: int
    size: int
    padding: int


class _Matrix(NamedTuple):
    kind: int
    shape: tuple[int, ...]
    name: str
    end: int
    """Where it ends in its stream."""


def read(paths: Paths, allocate: Allocate = in_memory, *, split: str) -> Columns:
    """Read one split of one file, images upright, sorted by writer where the file knows writers.

    Args:
        paths: the one file.
        allocate: makes the columns ``x`` [n, 28, 28] uint8 and ``y`` [n] int64.
        split: ``train`` or ``test``.

    Raises:
        InputError: for another layout, a damaged file, or MATLAB's version 7.3.
    """
    if split not in ("train", "test"):
        raise unknown("split", split, ("train", "test"))
    files = as_paths(paths)
    if len(files) != 1:
        raise InputError(f"expected one MATLAB file, not {len(files)}: give one at a time")
    (path,) = files
    # Images come before writers in the file: the first pass passes them by and finds their order.
    counts: list[int] = []

    def measure(stream: _Stream, images: int) -> None:
        counts.append(images)
        stream.skip(images * _SIDE**2)

    values = _scan(path, split, measure)
    where = f"{path}: dataset.{split}"
    if len(counts) != 1 or counts[0] == 0 or "labels" not in values:
        raise InputError(f"{where} has no images or no labels: give one of NIST's EMNIST files")
    (rows,) = counts
    numbers = {name: _whole(column, rows, f"{where}.{name}") for name, column in values.items()}
    grouping = by_writer(numbers["writers"]) if "writers" in numbers else ungrouped(rows)
    y = allocate("y", (rows,), np.int64)
    y[:] = numbers["labels"][grouping.order]
    x = allocate("x", (rows, _SIDE, _SIDE), np.uint8)
    place = grouping.place

    def fill(stream: _Stream, images: int) -> None:
        assert images == rows
        # A matrix is stored column by column, and so is each image in its row of the matrix.
        for column in range(_SIDE):
            pixels = np.frombuffer(stream.read(_SIDE * rows), np.uint8)
            x[place, :, column] = pixels.reshape(_SIDE, rows).T

    _scan(path, split, fill)
    return Columns({"x": x, "y": y}, grouping.owners)


def _whole(column: Array, rows: int, where: str) -> npt.NDArray[np.int64]:
    values = numbers_or_strings(column.reshape(-1), where)
    assert not isinstance(values, list)
    if len(values) != rows:
        raise InputError(f"{where}: {len(values)} for {rows} images: give one of NIST's files")
    if values.min() < 0:
        row = int(np.argmax(values < 0))
        raise InputError(f"{where}: {values[row]} in row {row}: expected a number from 0")
    return values


def _scan(path: Path, split: str, images: _Images) -> dict[str, Array]:
    """Walk to a split, let ``images`` read its images, and give back its other columns."""
    size = file_size(path)
    with reading(str(path)), path.open("rb") as file:
        try:
            return _dataset(file, size, split, images, str(path))
        except (_Damaged, struct.error, zlib.error, UnicodeError) as error:
            reason = str(error) if isinstance(error, _Damaged) else "is cut off or damaged"
            raise InputError(f"{path}: {reason}: get the file again") from None


def _dataset(
    file: IO[bytes], size: int, split: str, images: _Images, where: str
) -> dict[str, Array]:
    _check_header(file.read(128), where)
    while file.tell() < size:
        kind, length = struct.unpack("<II", file.read(8))
        if kind not in (_MATRIX, _COMPRESSED) or length > size - file.tell():
            raise _Damaged("is cut off or damaged")
        following = file.tell() + length
        packed = kind == _COMPRESSED
        bound = unpacked_bound(size) if packed else length
        stream = _Stream(file, length, packed=packed, bound=bound)
        if packed:
            tag = _tag(stream)
            if tag.kind != _MATRIX:
                raise _Damaged("is damaged")
            length = tag.size
        matrix = _matrix(stream, stream.position + length, where)
        if matrix.name == "dataset":
            values = _split(stream, matrix, split, images, where)
            stream.finish()
            return values
        file.seek(following)
    raise InputError(f"{where}: no variable 'dataset': give one of NIST's EMNIST files")


def _check_header(header: bytes, where: str) -> None:
    if header.startswith((b"MATLAB 7.3", b"\x89HDF")):
        raise InputError(
            f"{where}: is a file of MATLAB 7.3: save it again in MATLAB with save(..., '-v7')"
        )
    if len(header) != 128 or header[124:] != b"\x00\x01IM":  # low byte first
        raise InputError(
            f"{where}: is no MATLAB file of version 5: give one of NIST's EMNIST files"
        )


def _tag(stream: _Stream) -> _Tag:
    (first,) = struct.unpack("<I", stream.read(4))
    if first >> 16:  # at most four bytes, which share the eight of the tag
        size = first >> 16
        if size > 4:
            raise _Damaged("is damaged")
        return _Tag(first & 0xFFFF, size, 4 - size)
    (size,) = struct.unpack("<I", stream.read(4))
    return _Tag(first, size, -size % 8)


def _element(stream: _Stream, kind: int, most: int) -> bytes:
    """A small element of a known type."""
    tag = _tag(stream)
    if tag.kind != kind or tag.size > most:
        raise _Damaged("is damaged")
    data = stream.read(tag.size)
    stream.skip(tag.padding)
    return data


def _matrix(stream: _Stream, end: int, where: str) -> _Matrix:
    """The beginning of a matrix: its class, shape and name."""
    flags = _element(stream, 6, 8)
    kind = struct.unpack("<I", flags[:4])[0] & 0xFF
    if kind in _UNSAFE:
        raise InputError(
            f"{where}: holds a MATLAB {_KINDS[kind]}, which is not read: save numbers only"
        )
    sizes = _element(stream, 5, 64)
    shape = struct.unpack(f"<{len(sizes) // 4}i", sizes)
    name = _element(stream, 1, 256).decode("ascii")
    if min(shape, default=-1) < 0:
        raise _Damaged("is damaged")
    return _Matrix(kind, shape, name, end)


def _fields(stream: _Stream, parent: _Matrix, where: str) -> Iterator[tuple[str, _Matrix]]:
    """The fields of a struct one after another; what is not read of one is skipped."""
    if parent.kind != _STRUCT or math.prod(parent.shape) != 1:
        raise InputError(f"{where} is no struct: give one of NIST's EMNIST files")
    width = struct.unpack("<i", _element(stream, 5, 4))[0]
    joined = _element(stream, 1, 4096)
    if width < 1 or len(joined) % width:
        raise _Damaged("is damaged")
    for first in range(0, len(joined), width):
        name = joined[first : first + width].split(b"\0")[0].decode("ascii")
        tag = _tag(stream)
        end = stream.position + tag.size
        if tag.kind != _MATRIX or end > parent.end:
            raise _Damaged("is damaged")
        if tag.size == 0:  # an empty field has no header
            continue
        matrix = _matrix(stream, end, f"{where}.{name}")
        yield name, matrix
        if stream.position > end:
            raise _Damaged("is damaged")
        stream.skip(end - stream.position)


def _split(
    stream: _Stream, dataset: _Matrix, split: str, images: _Images, where: str
) -> dict[str, Array]:
    for name, part in _fields(stream, dataset, f"{where}: dataset"):
        if name == split:
            return _columns(stream, part, images, f"{where}: dataset.{split}")
    raise InputError(f"{where}: dataset has no {split}: give one of NIST's EMNIST files")


def _columns(stream: _Stream, part: _Matrix, images: _Images, where: str) -> dict[str, Array]:
    values: dict[str, Array] = {}
    for name, matrix in _fields(stream, part, where):
        if name not in ("images", "labels", "writers"):
            continue
        if matrix.kind not in _NUMERIC:
            kind = _KINDS.get(matrix.kind, "struct")
            raise InputError(f"{where}.{name} is a MATLAB {kind}: expected numbers")
        tag = _tag(stream)
        count = math.prod(matrix.shape)
        if tag.kind not in _NUMBERS:
            raise InputError(f"{where}.{name} is damaged: get the file again")
        dtype = np.dtype("<" + _NUMBERS[tag.kind])
        if tag.size != count * dtype.itemsize or stream.position + tag.size > matrix.end:
            raise InputError(f"{where}.{name} is damaged: get the file again")
        if name == "images":
            if matrix.shape[1:] != (_SIDE**2,) or matrix.kind != _UINT8 or dtype != np.uint8:
                raise InputError(
                    f"{where}.images has shape {matrix.shape}: expected bytes [n, {_SIDE**2}]"
                )
            images(stream, matrix.shape[0])
        else:
            values[name] = np.frombuffer(stream.read(tag.size), dtype)
    return values
