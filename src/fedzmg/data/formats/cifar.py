"""Readers for CIFAR-100: the binary version, and the one pickled by Python 2.

Binary: records of 3,074 bytes: the coarse label, the fine label, and 32 by 32 pixels of red, green
and blue. Pickled: a dictionary with ``data`` [n, 3072], ``fine_labels`` and ``coarse_labels``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats.common import Paths, as_paths, join, reading, refuse_row

# fmt: off
FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)
# fmt: on
"""Coarse label of each fine label."""

_REMEDY = "give the official file of CIFAR-100"
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def read_cifar_binary(paths: Paths) -> Columns:
    """Read ``train.bin`` or ``test.bin``; several files are put one after the other."""
    return _read_all(paths, _records)


def read_cifar_python(paths: Paths) -> Columns:
    """Read the pickled ``train`` or ``test``; several files are put one after the other.

    The unpickler accepts NumPy arrays, rebuilds them itself, and runs nothing.
    """
    return _read_all(paths, _unpickled)


def _read_all(paths: Paths, read_one: Callable[[Path], dict[str, Array]]) -> Columns:
    files = []
    for path in as_paths(paths):
        with reading(str(path), _REMEDY):
            files.append(read_one(path))
            fine, coarse = files[-1]["y"], files[-1]["coarse"]
            refuse_row((fine < 0) | (fine > 99), f"{path}: fine label", fine, "expected 0 to 99")
            wrong = np.array(FINE_TO_COARSE)[fine] != coarse
            refuse_row(wrong, f"{path}: coarse label", coarse, f"not of its fine label: {_REMEDY}")
    names = ("x", "y", "coarse")
    return Columns({name: join([file[name] for file in files]) for name in names})


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
    """Unpickler for arrays, numbers, text and containers."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
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
