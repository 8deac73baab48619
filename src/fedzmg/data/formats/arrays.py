"""NumPy arrays: in memory, in one ``.npz`` file, or in ``.npy`` files called x, y and clients."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, Strings, in_memory
from fedzmg.data.formats.rows import (
    Grouping,
    Paths,
    as_paths,
    as_strings,
    blocks,
    by_client,
    check_numbers,
    check_type,
    classes_note,
    file_size,
    labels,
    numbers_or_strings,
    pack,
    reading,
    refuse_bomb,
    ungrouped,
)
from fedzmg.errors import InputError


def from_arrays(x: Any, y: Any = None, clients: Any = None) -> Columns:
    """Arrays, or anything that NumPy makes arrays of, as columns; types stay as they are.

    Args:
        x: one row for each example: numbers of any shape, or strings.
        y: a label for each row, whole numbers or names of classes.
        clients: the client of each row, whole numbers or strings.

    Raises:
        InputError: for different lengths, no row, or values that cannot be used.
    """
    where = "arrays"
    if isinstance(x, str | bytes):
        raise InputError(f"{where}: x is a single string: give one for each row")
    with reading(f"{where}: x", "give rows of equal shape"):
        text = isinstance(x, list | tuple) and any(isinstance(row, str | bytes) for row in x)
        values = x if text else np.asarray(x)
        if not text and values.dtype.kind in "USO":
            values, text = values.tolist(), values.ndim == 1
        rows = len(values)
    if rows == 0:
        raise InputError(f"{where}: no row: give at least one")
    grouping = ungrouped(rows) if clients is None else by_client(clients, rows, where)
    columns: dict[str, Column] = {}
    if text:
        strings = as_strings(list(values), f"{where}: x")
        columns["text"] = pack([strings[i] for i in grouping.order], where)
    else:
        array = np.asarray(values)
        check_type(array.dtype, f"{where}: x")
        check_numbers(array, 0, f"{where}: x")
        columns["x"] = array[grouping.order]
    classes: tuple[str, ...] = ()
    if y is not None:
        ids, classes = labels(y, where)
        _same_length({"x": rows, "y": len(ids)}, where)
        columns["y"] = ids[grouping.order]
    return Columns(columns, grouping.owners, classes_note(classes), classes)


def _same_length(lengths: dict[str, int], where: str) -> None:
    if len(set(lengths.values())) != 1:
        said = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise InputError(f"{where}: arrays differ in length ({said}): give one entry for each row")


class _Stored(NamedTuple):
    """An array in a file that was not read yet."""

    where: str
    open: Callable[[], IO[bytes]]
    size: int
    """Bytes that the file says it unpacks to."""
    stored: int
    """Bytes that are really there."""


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool


_ROLES = {"x": "x", "y": "y", "clients": "clients", "client": "clients"}


def read(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read one ``.npz`` file with arrays x, y and clients, or one ``.npy`` file for each.

    Without clients the rows belong to nobody yet. Nothing is unpickled.

    Raises:
        InputError: for missing arrays, arrays that do not fit together, and damaged files.
    """
    files = as_paths(paths)
    if not files:
        raise InputError("no file is given: give one .npz file, or .npy files for x, y and clients")
    with contextlib.ExitStack() as stack:
        if len(files) == 1 and _is_zip(files[0]):
            where = str(files[0])
            found, notes = _members(files[0], stack)
        else:
            where = ", ".join(str(path) for path in files)
            found, notes = _files(files), []
        for role in ("x", "y"):
            if role not in found:
                raise InputError(
                    f"{where}: no array {role!r} (it has {', '.join(found) or 'none'}{_rest(notes)}"
                    "): write them with numpy.savez(FILE, x=..., y=..., clients=...)"
                )
        headers = {role: _header(stored) for role, stored in found.items()}
        _same_length({role: header.shape[0] for role, header in headers.items()}, where)
        rows = headers["x"].shape[0]
        ids, classes = labels(_whole(found["y"], headers["y"]), found["y"].where)
        if "clients" in found:
            clients = _whole(found["clients"], headers["clients"])
            grouping = by_client(clients, rows, found["clients"].where)
        else:
            grouping = ungrouped(rows)
        y = allocate("y", (rows,), np.int64)
        y[:] = ids[grouping.order]
        x = _inputs(found["x"], headers["x"], grouping, allocate)
        name = "text" if isinstance(x, Strings) else "x"
        said = (*notes, *classes_note(classes))
        return Columns({name: x, "y": y}, grouping.owners, said, classes)


def _rest(notes: Sequence[str]) -> str:
    return f"; {'; '.join(notes)}" if notes else ""


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _is_zip(path: Path) -> bool:
    file_size(path)
    with reading(str(path)), path.open("rb") as file:
        packed = file.read(2) == b"PK"
    if not packed and path.suffix.lower() == ".npz":
        raise InputError(f"{path}: is no .npz file: get it again, or write it with numpy.savez")
    return packed


def _members(path: Path, stack: contextlib.ExitStack) -> tuple[dict[str, _Stored], list[str]]:
    found: dict[str, _Stored] = {}
    others = []
    size = file_size(path)
    with reading(str(path)):
        archive = stack.enter_context(zipfile.ZipFile(path))
        for info in archive.infolist():
            role = _ROLES.get(info.filename.removesuffix(".npy"))
            where = f"{path}: array {info.filename.removesuffix('.npy')!r}"
            if role is None:
                others.append(info.filename.removesuffix(".npy"))
                continue
            if role in found:
                raise InputError(f"{where} occurs twice: keep one of them")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise InputError(f"{where} is packed in an unusual way: write it with numpy.savez")
            stored = min(info.compress_size, size)
            found[role] = _Stored(where, partial(archive.open, info), info.file_size, stored)
    return found, [f"arrays not used: {', '.join(map(repr, others))}"] if others else []


def _files(paths: Sequence[Path]) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for path in paths:
        parts = [part for part in re.split("[^a-z]+", path.stem.lower()) if part in _ROLES]
        if len(parts) != 1:
            raise InputError(
                f"{path}: its name does not say which array it holds: call the files x.npy, y.npy "
                "and clients.npy, or give one .npz file"
            )
        role = _ROLES[parts[0]]
        if role in found:
            raise InputError(f"{path}: a second file for {role!r}: give one")
        size = file_size(path)
        found[role] = _Stored(str(path), partial(_open, path), size, size)
    return found


def _header(stored: _Stored) -> _Header:
    """Shape and type, checked against the size of the file."""
    with reading(stored.where), stored.open() as stream:
        shape, dtype, fortran = _parse(stream, stored.where)
        begin = stream.tell()
    if dtype.kind not in "US":
        check_type(dtype, stored.where)
    if not shape or min(shape) < 1 or dtype.itemsize == 0:
        raise InputError(f"{stored.where}: has shape {shape}, no example: give at least one row")
    size = math.prod(shape) * dtype.itemsize
    if begin + size != stored.size:
        raise InputError(
            f"{stored.where}: shape {shape} of {dtype} needs {size:,} bytes, but there are "
            f"{stored.size - begin:,}: it is damaged; write it again"
        )
    refuse_bomb(stored.where, max(size, 8 * shape[0]), stored.stored)
    return _Header(shape, dtype, fortran)


def _parse(stream: IO[bytes], where: str) -> _Header:
    version = np.lib.format.read_magic(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers in an old notation, and damaged ones
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise InputError(f"{where}: has npy version {version}: expected plain numbers")
    return _Header(tuple(int(n) for n in shape), dtype, fortran)


def _whole(stored: _Stored, header: _Header) -> Array:
    with reading(stored.where), stored.open() as stream:
        _parse(stream, stored.where)
        rows, *shape = header.shape
        parts = [b for _, b in blocks(stream, rows, tuple(shape), header.dtype, stored.where)]
        values = np.concatenate(parts)
    if header.fortran:
        values = values.reshape(-1).reshape(header.shape, order="F")
    return values


def _inputs(stored: _Stored, header: _Header, grouping: Grouping, allocate: Allocate) -> Column:
    if header.dtype.kind in "US":
        values = numbers_or_strings(_whole(stored, header), stored.where)
        assert isinstance(values, list)
        return pack([values[i] for i in grouping.order], stored.where)
    out = allocate("x", header.shape, header.dtype.newbyteorder("="))
    if header.fortran:
        values = _whole(stored, header)
        check_numbers(values, 0, stored.where)
        out[:] = values[grouping.order]
        return out
    place = grouping.place
    with reading(stored.where), stored.open() as stream:
        _parse(stream, stored.where)
        rows, *shape = header.shape
        for part, block in blocks(stream, rows, tuple(shape), header.dtype, stored.where):
            check_numbers(block, part.start, stored.where)
            out[place[part]] = block
    return out
