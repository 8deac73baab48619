"""The idx files of MNIST and EMNIST, packed with gzip or plain.

Big-endian header: two zero bytes, a type, the number of dimensions, and 32 bits for each
dimension; then the numbers, last dimension fastest. Rows are counted from 0.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats.rows import (
    Grouping,
    OnePath,
    Paths,
    as_paths,
    blocks,
    by_client,
    by_writer,
    file_size,
    numbers_or_strings,
    reading,
    refuse_bomb,
    ungrouped,
)
from fedzmg.errors import InputError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4"}
_GZIP = b"\x1f\x8b"
_LONGEST_NAME = 256


class _Idx(NamedTuple):
    """What the header of a file says; it fits the size of the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def begin(self) -> int:
        """Bytes before the numbers."""
        return 4 + 4 * len(self.shape)


def read(
    paths: Paths,
    allocate: Allocate = in_memory,
    *,
    transposed: bool = False,
    writers: OnePath | None = None,
) -> Columns:
    """Read an images file and a labels file, in any order.

    Args:
        paths: the two files.
        allocate: makes the columns ``x`` [n, height, width] uint8 and ``y`` [n] int64.
        transposed: swap rows and columns of the images; EMNIST's own files need it.
        writers: a file with the writer of each image: an idx file, or one id a line.

    Raises:
        InputError: for files that are damaged, do not belong together, or unpack to another size
            than they say.
    """
    images, labels = _pair([_header(path) for path in as_paths(paths)])
    rows, height, width = images.shape
    if labels.shape[0] != rows:
        raise InputError(
            f"{labels.path} holds {labels.shape[0]} labels but {images.path} holds {rows} images: "
            "give two files that belong together"
        )
    grouping = ungrouped(rows) if writers is None else _group(Path(writers), rows)
    y = allocate("y", (rows,), np.int64)
    y[:] = _values(labels)[grouping.order]
    x = allocate("x", (rows, width, height) if transposed else images.shape, np.uint8)
    place = grouping.place
    with reading(str(images.path)), _open(images.path) as stream:
        stream.read(images.begin)
        for part, block in blocks(stream, rows, (height, width), images.dtype, str(images.path)):
            x[place[part]] = block.swapaxes(1, 2) if transposed else block
    return Columns({"x": x, "y": y}, grouping.owners)


def _pair(found: list[_Idx]) -> tuple[_Idx, _Idx]:
    by_rank = {idx.dtype.str + str(len(idx.shape)): idx for idx in found}
    if len(found) != 2 or set(by_rank) != {"|u13", "|u11"}:
        said = ", ".join(f"{idx.path} has shape {idx.shape} of {idx.dtype}" for idx in found)
        raise InputError(
            f"expected a file of images (three dimensions of bytes) and a file of labels (one), "
            f"but {said or 'there is none'}: give one of each"
        )
    return by_rank["|u13"], by_rank["|u11"]


def _open(path: Path) -> IO[bytes]:
    """The file unpacked; its first bytes decide, not its name."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _header(path: Path) -> _Idx:
    """Read a header and compare it with the real size, without keeping what is unpacked."""
    where = str(path)
    stored = file_size(path)
    with reading(where), _open(path) as stream:
        start = stream.read(4)
        zeros, code, rank = struct.unpack(">HBB", start.ljust(4, b"\xff"))
        if zeros != 0 or code not in _TYPES or not 1 <= rank <= 3:
            raise InputError(
                f"{where}: is no idx file of images or labels (it begins with "
                f"{start.hex() or 'nothing'}): give an idx file, plain or packed with gzip"
            )
        shape = struct.unpack(f">{rank}I", stream.read(4 * rank))
        idx = _Idx(path, shape, np.dtype(_TYPES[code]))
        size = math.prod(shape) * idx.dtype.itemsize
        if size == 0:
            raise InputError(f"{where}: has shape {shape}: it holds nothing; give another file")
        refuse_bomb(where, size, stored)
        plain = not isinstance(stream, gzip.GzipFile)
        real = stored - idx.begin if plain else _count(stream, size + 1)
    if real != size:
        relation = "more" if real > size else f"only {real:,}"
        raise InputError(
            f"{where}: shape {shape} needs {size:,} bytes, but there are {relation}: it is "
            "damaged; get it again"
        )
    return idx


def _count(stream: IO[bytes], at_most: int) -> int:
    """Bytes that are left in a stream, up to a bound."""
    count = 0
    while data := stream.read(min(2**20, at_most - count)):
        count += len(data)
    return count


def _values(idx: _Idx) -> Array:
    with reading(str(idx.path)), _open(idx.path) as stream:
        stream.read(idx.begin)
        parts = [b for _, b in blocks(stream, idx.shape[0], (), idx.dtype, str(idx.path))]
        return np.concatenate(parts).astype(np.int64)


def _group(path: Path, rows: int) -> Grouping:
    file_size(path)
    with reading(str(path)), _open(path) as stream:
        binary = stream.read(2) == b"\0\0"
    if not binary:
        return _group_lines(path, rows)
    idx = _header(path)
    if idx.shape != (rows,):
        raise InputError(f"{path}: has shape {idx.shape}: expected one writer for {rows} images")
    writers = _values(idx)
    if writers.min() < 0:
        row = int(np.argmax(writers < 0))
        raise InputError(f"{path}: writer {writers[row]} in row {row}: expected a number from 0")
    return by_writer(writers)


def _group_lines(path: Path, rows: int) -> Grouping:
    limit = _LONGEST_NAME * (rows + 1)
    with reading(str(path)), _open(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"{path}: is too long for {rows} lines with one writer each")
    entries = [line.strip() for line in data.rstrip().split(b"\n")]
    if len(entries) != rows:
        raise InputError(f"{path}: has {len(entries)} lines for {rows} images: give one for each")
    names = numbers_or_strings(entries, f"{path}: writers")
    assert isinstance(names, list)
    if all(name.isascii() and name.isdigit() and len(name) < 19 for name in names):
        return by_writer(np.array(names).astype(np.int64))
    return by_client(names, rows, str(path))
