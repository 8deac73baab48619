"""Readers for CIFAR-100: the binary version, and the one pickled by Python 2.

Binary: records of 3,074 bytes: the coarse label, the fine label, and 32 by 32 pixels of red, green
and blue. Pickled: a dictionary with ``data`` [n, 3072], ``fine_labels`` and ``coarse_labels``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats.common import Paths, as_paths, file_size, fill, reading, refuse_row
from fedzmg.errors import InputError

# fmt: off
FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)
# fmt: on
"""Coarse label of each fine label."""

_RECORD = 2 + 3072
_REMEDY = "give the official file of CIFAR-100"
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _Batch(NamedTuple):
    """Images of one file."""

    pixels: Array
    fine: Array
    coarse: Array


def read_cifar_binary(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read ``train.bin`` or ``test.bin``; several files are put one after the other."""
    return _read_all(paths, allocate, _records)


def read_cifar_python(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read the pickled ``train`` or ``test``; several files are put one after the other.

    The unpickler accepts NumPy arrays, rebuilds them itself, and runs nothing.
    """
    return _read_all(paths, allocate, _unpickled)


def _read_all(paths: Paths, allocate: Allocate, read_one: Callable[[Path], _Batch]) -> Columns:
    batches = []
    for path in as_paths(paths, "CIFAR-100 file"):
        file_size(path)
        with reading(str(path), _REMEDY):
            batches.append(read_one(path))
            _check(batches[-1], str(path))
    x = np.concatenate([batch.pixels for batch in batches]).reshape(-1, 3, 32, 32)
    y, coarse = (np.concatenate([batch[i] for batch in batches]) for i in (1, 2))
    columns = {"x": x, "y": y, "coarse": coarse}
    return Columns({name: fill(allocate, name, values) for name, values in columns.items()})


def _records(path: Path) -> _Batch:
    size = file_size(path)
    if size == 0 or size % _RECORD:
        raise InputError(f"{path}: {size:,} bytes are not a multiple of {_RECORD:,}: {_REMEDY}")
    records = np.memmap(path, np.uint8, mode="r").reshape(-1, _RECORD)
    return _Batch(records[:, 2:], records[:, 1].astype(np.int64), records[:, 0].astype(np.int64))


class _Pickled:
    """Arguments and state of a pickled array or dtype; NumPy itself trusts them too much."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> Array:
        """Return an array of bytes [n, 3072]; anything else raises an exception."""
        _, shape, dtype, fortran, data = self.state
        if dtype.arguments[0] not in ("u1", b"u1") or fortran or shape[1:] != (3072,):
            raise ValueError(f"shape {shape}")
        return np.frombuffer(data, np.uint8).reshape(shape)


class _Unpickler(pickle.Unpickler):
    """Unpickler for arrays, numbers, text and containers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not run")
        return _Pickled


def _unpickled(path: Path) -> _Batch:
    with path.open("rb") as file:
        content = _Unpickler(file, encoding="bytes").load()
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds a {type(content).__name__}: {_REMEDY}")
    named = {key.decode() if isinstance(key, bytes) else key: content[key] for key in content}
    try:
        data = named["data"].pixels()
    except Exception:
        raise InputError(f"{path}: 'data' is not an array of bytes [n, 3072]: {_REMEDY}") from None
    fine, coarse = (
        _label_column(named.get(key), len(data), f"{path}: {key}")
        for key in ("fine_labels", "coarse_labels")
    )
    return _Batch(data, fine, coarse)


def _label_column(values: Any, rows: int, where: str) -> Array:
    if not isinstance(values, list) or len(values) != rows or rows == 0:
        raise InputError(f"{where}: expected a list with one label for each of {rows} images")
    for row, value in enumerate(values):
        if type(value) is not int or abs(value) >= 2**31:
            raise InputError(f"{where}: image {row} has a label that is not a small number")
    return np.array(values, np.int64)


def _check(batch: _Batch, where: str) -> None:
    for name, values, most in (("fine", batch.fine, 99), ("coarse", batch.coarse, 19)):
        bad = (values < 0) | (values > most)
        refuse_row(bad, f"{where}: {name} label", values, f"expected 0 to {most}")
    wrong = np.array(FINE_TO_COARSE)[batch.fine] != batch.coarse
    refuse_row(
        wrong, f"{where}: the fine label does not belong to coarse label", batch.coarse, _REMEDY
    )
