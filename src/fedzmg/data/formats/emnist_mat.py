"""Reader for NIST's EMNIST in MATLAB 5 files: ``dataset.{train,test}.{images,labels,writers}``."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedzmg.data.columns import Allocate, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Ids, Paths
from fedzmg.errors import InputError, unknown

_REMEDY = "give one of NIST's EMNIST files"


def read_mat(paths: Paths, allocate: Allocate = in_memory, *, split: str = "train") -> Columns:
    """Read one split of one file, images upright, sorted by writer where the file names writers.

    Args:
        paths: the one file.
        allocate: makes the columns ``x`` [n, 28, 28] uint8 and ``y`` [n] int64.
        split: ``train`` or ``test``.
    """
    if split not in ("train", "test"):
        raise unknown("split", split, ("train", "test"))
    files = common.as_paths(paths, "MATLAB file")
    if len(files) != 1:
        raise InputError(f"{len(files)} MATLAB files: give one at a time")
    (path,) = files
    common.file_size(path)
    with common.reading(str(path), _REMEDY):
        from scipy.io import loadmat

        try:
            content = loadmat(path, variable_names=["dataset"])
        except NotImplementedError:
            raise InputError(
                f"{path}: is a file of MATLAB 7.3: save it again with save(..., '-v7')"
            ) from None
        part = _field(_field(content, "dataset", str(path)), split, f"{path}: dataset")
        where = f"{path}: dataset.{split}"
        images = _field(part, "images", where)
        if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != 784:
            raise InputError(f"{where}.images has shape {images.shape}: expected bytes [n, 784]")
        rows = len(images)
        if rows == 0:
            raise InputError(f"{where} has no images: {_REMEDY}")
        ids = _whole(_field(part, "labels", where), rows, f"{where}.labels")
        grouping = common.ungrouped(rows)
        if "writers" in part.dtype.names:
            writers = _whole(_field(part, "writers", where), rows, f"{where}.writers")
            grouping = common.by_writer(writers)
    y = common.fill(allocate, "y", ids[grouping.order])
    # MATLAB stores each image column by column.
    upright = images[grouping.order].reshape(rows, 28, 28).swapaxes(1, 2)
    x = common.fill(allocate, "x", upright)
    return Columns({"x": x, "y": y}, grouping.owners)


def _field(parent: Any, name: str, where: str) -> Any:
    names = parent if isinstance(parent, dict) else parent.dtype.names or ()
    if name not in names:
        raise InputError(f"{where} has no {name!r}: {_REMEDY}")
    value = parent[name]
    # A struct is an object array of shape [1, 1].
    return value if isinstance(parent, dict) else value.reshape(-1)[0]


def _whole(column: Any, rows: int, where: str) -> Ids:
    if column.dtype.kind not in "biuf":
        raise InputError(f"{where} has type {column.dtype}: expected numbers")
    values = common.numbers_or_strings(column.reshape(-1), where)
    assert not isinstance(values, list)
    if len(values) != rows:
        raise InputError(f"{where}: {len(values)} for {rows} images: {_REMEDY}")
    common.refuse_row(values < 0, f"{where}:", values, "expected a number from 0")
    return values
