"""Readers for MNIST and EMNIST: idx files, plain or compressed with gzip, and MATLAB 5 files.

idx: a big-endian header of two zero bytes, a type, the number of dimensions, and 32 bits for each
dimension; then the numbers, last dimension fastest. MATLAB, from NIST:
``dataset.{train,test}.{images,labels,writers}``.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, OnePath, Paths
from fedzmg.errors import InputError, unknown

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4"}
_LONGEST_NAME = 256
_MATLAB = "give one of NIST's EMNIST files, in the format of MATLAB 5 to 7.2"


def read_idx(paths: Paths, *, transposed: bool = False, writers: OnePath | None = None) -> Columns:
    """Read an images file and a labels file, in any order.

    Args:
        paths: the two files.
        transposed: swap rows and columns of the images; EMNIST's own files need it.
        writers: a file with the writer of each image: an idx file, or one id a line.
    """
    files = common.as_paths(paths)
    arrays = sorted((_array(path) for path in files), key=lambda array: -array.ndim)
    where = ", ".join(map(str, files))
    if [f"{a.dtype}{a.ndim}" for a in arrays] != ["uint83", "uint81"]:
        shapes = ", ".join(f"{array.shape} of {array.dtype}" for array in arrays)
        raise InputError(f"{where}: shapes {shapes}: give one file of images and one of labels")
    images, labels = arrays
    clients = None if writers is None else _writers(common.as_paths(writers)[0], len(images))
    grouping = common.by_client(clients, len(images), str(writers))
    x = images.swapaxes(1, 2) if transposed else images
    return common.assemble(where, grouping, x, labels)


def _open(path: Path) -> IO[bytes]:
    """Open a file and decompress it if its first bytes ask for it."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def _array(path: Path) -> Array:
    with common.reading(str(path), REMEDY), _open(path) as stream:
        start = stream.read(4)
        zeros, code, rank = struct.unpack(">HBB", start.ljust(4, b"\xff"))
        if zeros != 0 or code not in _TYPES or not 1 <= rank <= 3:
            raise InputError(f"{path}: begins with '{start.hex()}': give an idx file")
        shape = struct.unpack(f">{rank}I", stream.read(4 * rank))
        dtype = np.dtype(_TYPES[code])
        size = math.prod(shape) * dtype.itemsize
        common.refuse_bomb(str(path), size, path.stat().st_size)
        data = stream.read(size + 1)
    if len(data) != size or size == 0:
        raise InputError(f"{path}: shape {shape} does not fit its size: get the file again")
    return np.frombuffer(data, dtype).reshape(shape)


def _writers(path: Path, rows: int) -> Array | list[bytes]:
    with common.reading(str(path), REMEDY), _open(path) as stream:
        data = stream.read(_LONGEST_NAME * (rows + 1))
    if data[:2] == b"\0\0":
        return _array(path).reshape(-1)
    return [line.strip() for line in data.rstrip().split(b"\n")]


def read_mat(paths: Paths, *, split: str = "train") -> Columns:
    """Read one split of one file, images upright, sorted by writer where the file names writers.

    Args:
        paths: the one file.
        split: ``train`` or ``test``.
    """
    if split not in ("train", "test"):
        raise unknown("split", split, ("train", "test"))
    [path] = common.as_paths(paths, single=True)
    where = f"{path}: dataset.{split}"
    with common.reading(where, _MATLAB):
        from scipy.io import loadmat

        # A struct is an object array of shape [1, 1].
        part = loadmat(path, variable_names=["dataset"])["dataset"][split].item()
        images = part["images"].item()
        if images.dtype != np.uint8 or images.size == 0:
            raise ValueError(f"images are {images.dtype} of shape {images.shape}")
        # MATLAB stores each image column by column.
        upright = images.reshape(len(images), 28, 28).swapaxes(1, 2)
        labels = part["labels"].item().reshape(-1)
        writers = part["writers"].item().reshape(-1) if "writers" in part.dtype.names else None
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"labels are {labels.dtype}")
    grouping = common.by_client(writers, len(upright), where)
    return common.assemble(where, grouping, upright, labels)
