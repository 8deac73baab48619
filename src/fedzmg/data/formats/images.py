"""Readers for official image files: MNIST, EMNIST and CIFAR-100.

idx files, plain or compressed with gzip: a big-endian header of two zero bytes, a type, the number
of dimensions, and 32 bits for each dimension; then the numbers, last dimension fastest. MATLAB 5
files of NIST: ``dataset.{train,test}.{images,labels,writers}``. Binary CIFAR-100: records of 3,074
bytes: the coarse label, the fine label, and 32 by 32 pixels of red, green and blue. CIFAR-100
pickled by Python 2: a dictionary with ``data`` [n, 3072], ``fine_labels`` and ``coarse_labels``.
"""

import gzip
import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, OnePath, Paths
from fedzmg.errors import InputError, check_names

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4"}
_CIFAR = "give the official file of CIFAR-100"
_ALLOWED = {
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray",
    "numpy.dtype",
}  # fmt: skip
_MATLAB = "give one of NIST's EMNIST files, in the format of MATLAB 5 to 7.2"

FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)  # fmt: skip


def read_idx(paths: Paths, *, transposed: bool = False, writers: OnePath | None = None) -> Columns:
    """Read an images file and a labels file, in any order.

    ``transposed`` swaps rows and columns of the images, which EMNIST's own files need. ``writers``
    is a file with the writer of each image: an idx file, or one id a line.
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
        data = stream.read(256 * (rows + 1))  # the longest names that are plausible
    if data[:2] == b"\0\0":
        return _array(path).reshape(-1)
    return [line.strip() for line in data.rstrip().split(b"\n")]


def read_mat(paths: Paths, *, split: str = "train") -> Columns:
    """Read one split of one file, images upright, sorted by writer where the file names writers."""
    check_names("split", [split], ("train", "test"))
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
    return common.assemble(where, common.by_client(writers, len(upright), where), upright, labels)


def read_cifar_binary(paths: Paths) -> Columns:
    """Read ``train.bin`` or ``test.bin``; several files are put one after the other."""
    return _read_all(paths, _records)


def read_cifar_python(paths: Paths) -> Columns:
    """Read the pickled ``train`` or ``test``; several files are put one after the other."""
    return _read_all(paths, _unpickled)


def _read_all(paths: Paths, read_one: Callable[[Path], dict[str, Array]]) -> Columns:
    files = []
    for path in common.as_paths(paths):
        with common.reading(str(path), _CIFAR):
            files.append(read_one(path))
            fine, coarse = files[-1]["y"], files[-1]["coarse"]
            bad = (fine < 0) | (fine > 99)
            common.refuse_row(bad, f"{path}: fine label", fine, "expected 0 to 99")
            bad, problem = np.array(FINE_TO_COARSE)[fine] != coarse, "not of its fine label"
            common.refuse_row(bad, f"{path}: coarse label", coarse, f"{problem}: {_CIFAR}")
    names = ("x", "y", "coarse")
    return Columns({name: np.concatenate([file[name] for file in files]) for name in names})


def _records(path: Path) -> dict[str, Array]:
    records = np.memmap(path, np.uint8, mode="r").reshape(-1, 3074)
    coarse, fine = records[:, :2].T.astype(np.int64)
    return {"x": records[:, 2:].reshape(-1, 3, 32, 32), "y": fine, "coarse": coarse}


class _Pickled:
    """Arguments and state of a pickled array or dtype; NumPy itself trusts them too much."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Unpickler for arrays, numbers, text and containers, which runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")
        return _Pickled


def _unpickled(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        content = _Unpickler(file, encoding="bytes").load()
    named = {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
    _, shape, dtype, fortran, data = named["data"].state
    if dtype.arguments[0] not in ("u1", b"u1") or fortran or shape[1:] != (3072,):
        raise ValueError(f"'data' has shape {shape}")
    columns = {"x": np.frombuffer(data, np.uint8).reshape(shape[0], 3, 32, 32)}
    for column, name in {"y": "fine_labels", "coarse": "coarse_labels"}.items():
        values = named[name]
        if set(map(type, values)) != {int} or len(values) != len(columns["x"]):
            raise ValueError(f"{name!r} does not hold one number for each image")
        columns[column] = np.array(values, np.int64)
    return columns
