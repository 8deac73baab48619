"""Columns on disk as plain ``.npy`` files that are mapped into memory instead of read.

::

    meta.json                 names, shapes, clients, notes, fingerprint, and what the caller adds
    column.x.npy              one file for each column of numbers
    column.text.bytes.npy     two for each column of strings
    column.text.offsets.npy
    clients.npy               where each client begins

A directory is written beside its place and moved there whole. No pickle is written or read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedzmg.data.cache import writing
from fedzmg.data.columns import Allocate, Array, Columns, Owners, Strings
from fedzmg.errors import InputError
from fedzmg.storage.files import sync_directory

FORMAT = 1

_ZEROS = bytes(2**20)
_COPY_BYTES = 2**24


def save(directory: Path, fill: Callable[[Allocate], Columns], *, meta: Mapping[str, Any]) -> None:
    """Write the columns that ``fill`` makes; what it allocates is mapped to files already.

    Args:
        directory: where they go; what was there is replaced in the end.
        fill: makes the columns. Arrays that it did not allocate are copied.
        meta: anything JSON can say about the columns, given back by :func:`describe`.

    Raises:
        InputError: if the disk is full or cannot be written. Nothing is left behind then, nor
            after any other failure.
    """
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}"
    with writing(directory):
        temporary.mkdir(parents=True)
    try:
        _write(temporary, directory, fill, meta)
        with writing(directory):
            _move(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(
    place: Path, directory: Path, fill: Callable[[Allocate], Columns], meta: Mapping[str, Any]
) -> None:
    content, files = _fill(place, directory, fill)
    # Nothing is mapped any more: some systems do not rename a mapped file.
    with writing(directory):
        for name, part in files.items():
            (place / part).rename(place / f"{name}.npy")
        for unused in place.glob("part.*"):
            unused.unlink()
        text = json.dumps({**content, "meta": dict(meta)}, indent=1)
        (place / "meta.json").write_text(text, encoding="utf-8")
        for path in place.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_directory(place)


def _fill(
    place: Path, directory: Path, fill: Callable[[Allocate], Columns]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write the arrays; what is to be said of them, and which file holds which."""
    made: list[Array] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        del name  # a reader may use the same one twice
        made.append(_reserve(place / f"part.{len(made)}", directory, shape, np.dtype(dtype)))
        return made[-1]

    columns = fill(allocate)
    arrays = _arrays(columns)
    files: dict[str, str] = {}
    for name, array in arrays.items():
        fresh = [i for i, part in enumerate(made) if _same(part, array)]
        if not fresh or f"part.{fresh[0]}" in files.values():
            _copy(array, allocate(name, array.shape, array.dtype))
            fresh = [len(made) - 1]
        files[name] = f"part.{fresh[0]}"
    content = {
        "format": FORMAT,
        "rows": columns.rows,
        "columns": {
            name: "strings" if isinstance(column, Strings) else "numbers"
            for name, column in columns.columns.items()
        },
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "types": {name: array.dtype.str for name, array in arrays.items()},
        "clients": None if columns.owners is None else list(columns.owners.names),
        "notes": list(columns.notes),
        "fingerprint": fingerprint(columns),
    }
    with writing(directory):
        for part in made:
            part.flush()  # type: ignore[attr-defined]
    return content, files


def _arrays(columns: Columns) -> dict[str, Array]:
    """Every array of the columns under the name of its file."""
    arrays: dict[str, Array] = {}
    for name, column in columns.columns.items():
        if not name.isidentifier():
            raise InputError(f"column {name!r} cannot be stored: use letters, digits and '_'")
        if isinstance(column, Strings):
            arrays[f"column.{name}.bytes"] = column.text
            arrays[f"column.{name}.offsets"] = column.offsets
        else:
            arrays[f"column.{name}"] = column
    if columns.owners is not None:
        arrays["clients"] = columns.owners.offsets
    return arrays


def _reserve(path: Path, directory: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A mapped file with room on the disk for all of it."""
    if dtype.hasobject:
        raise InputError(f"column of type {dtype} cannot be stored: it holds Python objects")
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(int(n) for n in shape),
    }
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    with writing(directory, size):
        with path.open("xb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            _claim(file.fileno(), file.tell(), size)
        return np.lib.format.open_memmap(path, mode="r+")


def _claim(handle: int, start: int, size: int) -> None:
    """Take disk space now: a mapped file that finds the disk full later kills the process."""
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, start, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL):
                raise
    os.lseek(handle, start, os.SEEK_SET)
    left = size
    while left:
        left -= os.write(handle, _ZEROS[: min(left, len(_ZEROS))])


def _same(part: Array, array: Array) -> bool:
    """Whether two arrays are the same whole piece of memory."""
    a, b = part.__array_interface__, array.__array_interface__
    layouts = [(x["data"][0], x["shape"], x["typestr"], x["strides"]) for x in (a, b)]
    return part.size > 0 and layouts[0] == layouts[1]


def _copy(array: Array, target: Array) -> None:
    step = max(1, _COPY_BYTES * len(array) // max(1, array.nbytes))
    for start in range(0, len(array), step):
        target[start : start + step] = array[start : start + step]


def _move(temporary: Path, directory: Path) -> None:
    """Put a finished directory in its place; a full directory cannot be renamed over."""
    old = temporary.with_name(f"{temporary.name}.old")
    had = directory.exists()
    if had:
        directory.rename(old)
    try:
        temporary.rename(directory)
    except BaseException:
        if had:
            old.rename(directory)
        raise
    sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def load(directory: Path) -> Columns:
    """Map stored columns into memory; changing them does not change the files.

    Raises:
        InputError: if the directory is damaged.
    """
    content = describe(directory)
    with _damage(directory):
        kinds, names = content["columns"], content["clients"]
        arrays = {name: _map(directory, name, content) for name in content["shapes"]}
        columns = {
            name: Strings(arrays[f"column.{name}.bytes"], arrays[f"column.{name}.offsets"])
            if kind == "strings"
            else arrays[f"column.{name}"]
            for name, kind in kinds.items()
        }
        for column in columns.values():
            if isinstance(column, Strings):
                _check_offsets(column.offsets, len(column.text))
        owners = None
        if names is not None:
            _check_offsets(arrays["clients"], content["rows"])
            owners = Owners(tuple(names), arrays["clients"])
        loaded = Columns(columns, owners, tuple(content["notes"]))
        if loaded.rows != content["rows"]:
            raise ValueError(f"{loaded.rows} rows where {content['rows']} were written")
        return loaded


def _map(directory: Path, name: str, content: dict[str, Any]) -> Array:
    array = np.load(directory / f"{name}.npy", mmap_mode="c", allow_pickle=False)
    found, written = (
        (list(array.shape), array.dtype.str),
        (
            content["shapes"][name],
            content["types"][name],
        ),
    )
    if found != written:
        raise ValueError(f"{name}.npy holds {found}, not {written}")
    return np.asarray(array)


def _check_offsets(offsets: Array, end: int) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ValueError("offsets are out of order")


def describe(directory: Path) -> dict[str, Any]:
    """What ``meta.json`` says; ``meta`` in it is what the caller of :func:`save` added.

    Raises:
        InputError: if it is missing, damaged or of another format.
    """
    path = directory / "meta.json"
    with _damage(directory):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("meta.json holds no table")
        if content.get("format") != FORMAT:
            raise ValueError(f"format {content.get('format')!r}, this version reads {FORMAT}")
    return content


@contextlib.contextmanager
def _damage(directory: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NumPy promises no set of errors for files that are damaged
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"stored data {directory} is damaged ({reason}): run 'fedzmg data import' or "
            "'fedzmg data get' again"
        ) from None


def fingerprint(columns: Columns) -> str:
    """SHA-256 of contents, order, names and clients: equal columns, equal fingerprint."""
    digest = hashlib.sha256()
    for name, array in sorted(_arrays(columns).items()):
        digest.update(f"{name}\x1f{array.dtype.str}\x1f{array.shape}\x1e".encode())
        if array.size:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    names = () if columns.owners is None else columns.owners.names
    digest.update("\x1f".join(names).encode(errors="surrogatepass"))
    return digest.hexdigest()
