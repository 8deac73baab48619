"""CIFAR-100 as its authors give it: the binary version, and the one pickled by Python 2.

Binary: records of 3,074 bytes, which are the coarse label, the fine label, and 32 by 32 pixels of
red, green and blue. Pickled: a dictionary with ``data`` [n, 3072], ``fine_labels`` and
``coarse_labels``. Images are counted from 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Allocate, Array, Columns, in_memory
from fedzmg.data.formats import plain_pickle
from fedzmg.data.formats.rows import Paths, as_paths, blocks, file_size, reading
from fedzmg.errors import InputError

# fmt: off
FINE_TO_COARSE = (
    4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
    6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
    16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
    12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
)
# fmt: on
"""The coarse label of each fine label."""

_IMAGE = (3, 32, 32)
_PIXELS = 3072
_RECORD = 2 + _PIXELS
_REMEDY = "get the file again"


def read_binary(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read ``train.bin`` or ``test.bin``; several files are put one after the other.

    Raises:
        InputError: for a file that is cut off, labels out of range, or a coarse label that does not
            belong to the fine one.
    """
    files = _given(paths)
    counts = [_records(path) for path in files]
    columns = _allocate(sum(counts), allocate)
    done = 0
    for path, count in zip(files, counts, strict=True):
        with reading(str(path)), path.open("rb") as stream:
            for part, block in blocks(stream, count, (_RECORD,), np.dtype(np.uint8), str(path)):
                coarse, fine, pixels = block[:, 0], block[:, 1], block[:, 2:]
                _check(fine, coarse, part.start, str(path))
                columns.fill(slice(done + part.start, done + part.stop), pixels, fine, coarse)
        done += count
    return columns.made()


def read_python(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read the pickled ``train`` or ``test``; several files are put one after the other.

    Nothing is unpickled, so nothing that a file names is ever run; see
    :mod:`fedzmg.data.formats.plain_pickle`.

    Raises:
        InputError: for any other pickle, a damaged one, or labels as in :func:`read_binary`.
    """
    found = [_batch(path) for path in _given(paths)]
    columns = _allocate(sum(len(batch.fine) for batch in found), allocate)
    done = 0
    for batch in found:
        rows = slice(done, done + len(batch.fine))
        columns.fill(rows, batch.pixels, batch.fine, batch.coarse)
        done = rows.stop
    return columns.made()


class _Making(NamedTuple):
    """Columns on the way."""

    x: Array
    y: Array
    coarse: Array

    def fill(self, rows: slice, pixels: Array, fine: Array, coarse: Array) -> None:
        """Put images into their place."""
        self.x[rows] = pixels.reshape(-1, *_IMAGE)
        self.y[rows] = fine
        self.coarse[rows] = coarse

    def made(self) -> Columns:
        """All of them."""
        return Columns(self._asdict())


def _allocate(rows: int, allocate: Allocate) -> _Making:
    return _Making(
        allocate("x", (rows, *_IMAGE), np.uint8),
        allocate("y", (rows,), np.int64),
        allocate("coarse", (rows,), np.int64),
    )


def _given(paths: Paths) -> list[Path]:
    files = as_paths(paths)
    if not files:
        raise InputError("no CIFAR-100 file given: name at least one")
    return files


def _records(path: Path) -> int:
    size = file_size(path)
    if size == 0 or size % _RECORD:
        raise InputError(
            f"{path}: has {size:,} bytes, which is no multiple of the {_RECORD:,} bytes of an "
            "image: it is cut off, or not the binary version of CIFAR-100; get it again"
        )
    return size // _RECORD


def _check(fine: Array, coarse: Array, first: int, where: str) -> None:
    """Refuse labels that CIFAR-100 does not have; the image ``first`` is the first of them."""
    for name, values, most in (("fine", fine, 100), ("coarse", coarse, 20)):
        if len(values) and not 0 <= values.min() <= values.max() < most:
            row = int(np.argmax((values < 0) | (values >= most)))
            raise InputError(
                f"{where}: image {first + row} has {name} label {values[row]}: expected 0 to "
                f"{most - 1}; is it CIFAR-100?"
            )
    wrong = np.array(FINE_TO_COARSE)[fine] != coarse
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            f"{where}: image {first + row} has fine label {fine[row]}, which belongs to coarse "
            f"label {FINE_TO_COARSE[fine[row]]}, but coarse label {coarse[row]}: {_REMEDY}"
        )


class _Batch(NamedTuple):
    pixels: npt.NDArray[np.uint8]
    fine: npt.NDArray[np.int64]
    coarse: npt.NDArray[np.int64]


def _batch(path: Path) -> _Batch:
    """The content of a pickled file."""
    content = plain_pickle.read(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no dictionary: give CIFAR-100's file train or test")
    named = {
        key if isinstance(key, str) else key.decode("latin-1"): content[key] for key in content
    }
    for key, kind in (
        ("data", plain_pickle.ByteMatrix),
        ("fine_labels", list),
        ("coarse_labels", list),
    ):
        if not isinstance(named.get(key), kind):
            raise InputError(
                f"{path}: has no {key!r} of the kind that CIFAR-100's files train and test have: "
                "give one of them"
            )
    rows, width = named["data"].shape
    fine, coarse = (
        _label_column(named, key, rows, path) for key in ("fine_labels", "coarse_labels")
    )
    if rows == 0 or width != _PIXELS:
        raise InputError(f"{path}: 'data' has shape [{rows}, {width}]: expected [n, {_PIXELS}]")
    _check(fine, coarse, 0, str(path))
    pixels = np.frombuffer(named["data"].values, np.uint8).reshape(rows, width)
    return _Batch(pixels, fine, coarse)


def _label_column(named: dict[str, Any], key: str, rows: int, path: Path) -> Array:
    values = named[key]
    if len(values) != rows:
        raise InputError(f"{path}: has {len(values)} {key} for {rows} images: {_REMEDY}")
    for row, value in enumerate(values):
        if type(value) is not int or abs(value) >= 2**31:
            raise InputError(f"{path}: image {row} has a label in {key} that is no small number")
    return np.array(values, np.int64)
