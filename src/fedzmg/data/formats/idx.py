"""Reader for the idx files of MNIST and EMNIST, plain or compressed with gzip.

Big-endian header: two zero bytes, a type, the number of dimensions, and 32 bits for each
dimension; then the numbers, last dimension fastest.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Grouping, OnePath, Paths
from fedzmg.errors import InputError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4"}
_LONGEST_NAME = 256


def read_idx(
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
    """
    files = common.as_paths(paths, "idx file")
    found = {path: _array(path) for path in files}
    kinds = {f"{array.dtype.str}{array.ndim}": path for path, array in found.items()}
    if len(files) != 2 or set(kinds) != {"|u13", "|u11"}:
        shapes = ", ".join(f"{path} has shape {a.shape} of {a.dtype}" for path, a in found.items())
        raise InputError(f"{shapes}: give one of each, a file of images and a file of labels")
    images, labels = found[kinds["|u13"]], found[kinds["|u11"]]
    rows = len(images)
    if len(labels) != rows:
        raise InputError(
            f"{kinds['|u11']}: {len(labels)} labels but {kinds['|u13']} holds {rows} images"
        )
    grouping = common.ungrouped(rows) if writers is None else _group(Path(writers), rows)
    if transposed:
        images = images.swapaxes(1, 2)
    y = common.fill(allocate, "y", labels[grouping.order].astype(np.int64))
    x = common.fill(allocate, "x", images[grouping.order])
    return Columns({"x": x, "y": y}, grouping.owners)


def _open(path: Path) -> IO[bytes]:
    """Open a file and decompress it if its first bytes ask for it."""
    common.file_size(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _array(path: Path) -> Array:
    stored = common.file_size(path)
    with common.reading(str(path)), _open(path) as stream:
        start = stream.read(4)
        zeros, code, rank = struct.unpack(">HBB", start.ljust(4, b"\xff"))
        if zeros != 0 or code not in _TYPES or not 1 <= rank <= 3:
            raise InputError(
                f"{path}: is not an idx file: it begins with {start.hex() or 'nothing'}"
            )
        shape = struct.unpack(f">{rank}I", stream.read(4 * rank))
        dtype = np.dtype(_TYPES[code])
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            raise InputError(f"{path}: has shape {shape}: it holds nothing; give another file")
        common.refuse_bomb(str(path), size, stored)
        data = stream.read(size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else f"only {len(data):,}"
        raise InputError(
            f"{path}: shape {shape} needs {size:,} bytes, but there are {found}: get it again"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _group(path: Path, rows: int) -> Grouping:
    with common.reading(str(path)), _open(path) as stream:
        binary = stream.read(2) == b"\0\0"
    if binary:
        writers = _array(path)
        if writers.shape != (rows,) or writers.min() < 0:
            raise InputError(
                f"{path}: smallest number {writers.min()}: expected one for each of {rows} images"
            )
        return common.by_writer(writers.astype(np.int64))
    limit = _LONGEST_NAME * (rows + 1)
    with common.reading(str(path)), _open(path) as stream:
        data = stream.read(limit + 1)
    lines = [line.strip() for line in data.rstrip().split(b"\n")]
    if len(data) > limit or len(lines) != rows:
        raise InputError(
            f"{path}: has {len(lines)} lines in {len(data):,} bytes: give one for each image"
        )
    names = common.as_strings(list(lines), f"{path}: writers")
    if all(name.isascii() and name.isdigit() and len(name) < 19 for name in names):
        return common.by_writer(np.array(names).astype(np.int64))
    return common.by_client(names, rows, str(path))
