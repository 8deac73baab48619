"""Reader for NumPy arrays: in memory, in one ``.npz`` file, or in ``.npy`` files x, y, clients."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Paths
from fedzmg.errors import InputError

_ROLES = {"x": "x", "y": "y", "clients": "clients", "client": "clients"}


def from_arrays(x: Any, y: Any = None, clients: Any = None) -> Columns:
    """Make columns of arrays, or of anything that NumPy makes arrays of; types stay as they are.

    Args:
        x: one row for each example: numbers of any shape, or strings.
        y: a label for each row, whole numbers or names of classes.
        clients: the client of each row, whole numbers or strings.
    """
    return _columns(x, y, clients, "arrays", in_memory)


def read_arrays(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read one ``.npz`` file with arrays x, y and clients, or one ``.npy`` file for each.

    Without clients the rows belong to nobody yet. Nothing is unpickled.
    """
    files = common.as_paths(paths, "file (.npz, or .npy for x, y and clients)")
    where = ", ".join(map(str, files))
    common.file_size(files[0])
    if len(files) == 1 and (zipfile.is_zipfile(files[0]) or files[0].suffix.lower() == ".npz"):
        found, notes = _members(files[0])
    else:
        found, notes = _npy_files(files), ()
    for role in ("x", "y"):
        if role not in found:
            raise InputError(
                f"{where}: no array {role!r}: write numpy.savez(FILE, x=..., y=..., clients=...)"
            )
    made = _columns(found["x"], found["y"], found.get("clients"), where, allocate)
    return Columns(made.columns, made.owners, (*notes, *made.notes), made.classes)


def _columns(x: Any, y: Any, clients: Any, where: str, allocate: Allocate) -> Columns:
    if isinstance(x, str | bytes):
        raise InputError(f"{where}: x is a single string: give one for each row")
    with common.reading(f"{where}: x", "give rows of equal shape"):
        text = isinstance(x, list | tuple) and any(isinstance(row, str | bytes) for row in x)
        values = x if text else np.asarray(x)
        if not text and values.dtype.kind in "USO":
            values, text = values.tolist(), values.ndim == 1
        rows = len(values)
    if rows == 0:
        raise InputError(f"{where}: no row: give at least one")
    grouping = common.ungrouped(rows) if clients is None else common.by_client(clients, rows, where)
    classes: tuple[str, ...] = ()
    columns: dict[str, Column] = {}
    if y is not None:
        ids, classes = common.labels(y, where)
        if len(ids) != rows:
            raise InputError(f"{where}: x {rows}, y {len(ids)}: give one label for each row")
        columns["y"] = common.fill(allocate, "y", ids[grouping.order])
    if text:
        strings = common.as_strings(list(values), f"{where}: x")
        return Columns(
            {"text": common.pack([strings[i] for i in grouping.order], where), **columns},
            grouping.owners, common.classes_note(classes), classes,
        )  # fmt: skip
    array = np.asarray(values)
    common.check_numbers(array, f"{where}: x")
    x = common.fill(allocate, "x", array[grouping.order])
    return Columns({"x": x, **columns}, grouping.owners, common.classes_note(classes), classes)


def _members(path: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    found: dict[str, Array] = {}
    others = []
    with common.reading(str(path)), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            where = f"{path}: array {name!r}"
            role = _ROLES.get(name)
            if role is None:
                others.append(name)
                continue
            if role in found:
                raise InputError(f"{where} occurs twice: keep one of them")
            common.refuse_bomb(where, info.file_size, info.compress_size)
            with common.reading(where), archive.open(info) as stream:
                found[role] = _load(stream, where)
                if stream.read(1):
                    raise InputError(f"{where}: is longer than its shape: write it again")
    return found, (f"arrays not used: {', '.join(map(repr, others))}",) if others else ()


def _npy_files(paths: Sequence[Path]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for path in paths:
        parts = [part for part in re.split("[^a-z]+", path.stem.lower()) if part in _ROLES]
        if len(parts) != 1:
            raise InputError(f"{path}: unknown array: call the files x.npy, y.npy and clients.npy")
        role = _ROLES[parts[0]]
        if role in found:
            raise InputError(f"{path}: a second file for {role!r}: give one")
        common.file_size(path)
        with common.reading(str(path)), path.open("rb") as stream:
            found[role] = _load(stream, str(path))
    return found


def _load(stream: Any, where: str) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers in an old notation, and damaged ones
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    if array.ndim == 0 or array.size == 0:
        raise InputError(f"{where}: has shape {array.shape}, no example: give at least one row")
    return array
