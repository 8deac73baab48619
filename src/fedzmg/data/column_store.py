"""Columns on disk as plain ``.npy`` files that are mapped into memory instead of read.

::

    meta.json                 names, shapes, clients, notes and fingerprint
    column.x.npy              one file for each column of numbers
    column.text.bytes.npy     two for each column of strings
    column.text.offsets.npy
    clients.npy               offsets of the clients

A directory is written under a temporary name and renamed when complete. No pickle is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedzmg.data.cache import writing
from fedzmg.data.columns import Allocate, Array, Column, Columns, Owners, Strings
from fedzmg.errors import InputError
from fedzmg.storage.files import sync_directory

FORMAT = 1


def save(directory: Path, fill: Callable[[Allocate], Columns]) -> str:
    """Write the columns that ``fill`` makes, and return their fingerprint.

    Args:
        directory: a directory that does not exist yet.
        fill: makes the columns. Arrays that it allocates are mapped to files; others are copied.
    """
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex[:8]}"
    with writing(directory):
        temporary.mkdir(parents=True)
    try:
        content, files = _fill(temporary, directory, fill)
        # Nothing is mapped any more: some systems do not rename a mapped file.
        with writing(directory):
            for name, part in files.items():
                (temporary / part).rename(temporary / f"{name}.npy")
            for unused in temporary.glob("part.*"):
                unused.unlink()
            (temporary / "meta.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
            for path in temporary.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            temporary.rename(directory)
            sync_directory(directory.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return str(content["fingerprint"])


def _fill(
    folder: Path, directory: Path, fill: Callable[[Allocate], Columns]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write the arrays; return the content of ``meta.json`` and the file of each array."""
    made: list[Array] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:  # noqa: ARG001
        # Numbered, since a reader may allocate a column twice.
        made.append(_reserve(folder / f"part.{len(made)}", directory, shape, np.dtype(dtype)))
        return made[-1]

    columns = fill(allocate)
    arrays = _arrays(columns)
    files: dict[str, str] = {}
    for name, array in arrays.items():
        number = next((i for i, part in enumerate(made) if part is array), None)
        if number is None or f"part.{number}" in files.values():
            number = len(made)
            allocate(name, array.shape, array.dtype)[...] = array
        files[name] = f"part.{number}"
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
    """Return every array under the name of its file."""
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
    """Map a new file, with its disk space reserved."""
    if dtype.hasobject:
        raise InputError(f"column of type {dtype} cannot be stored: it holds Python objects")
    shape = tuple(int(n) for n in shape)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    with writing(directory, size):
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if size and hasattr(os, "posix_fallocate"):
            # A mapped file that finds the disk full later kills the process.
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array


def load(directory: Path) -> Columns:
    """Map stored columns into memory; changing them does not change the files."""
    try:
        return _load(directory)
    except Exception as error:  # NumPy raises anything on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"stored data {directory} is damaged ({reason}): run 'fedzmg data import' or "
            "'fedzmg data get' again"
        ) from None


def _load(directory: Path) -> Columns:
    content = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
    arrays = {}
    for name, shape in content["shapes"].items():
        mapped = np.load(directory / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        found = (list(mapped.shape), mapped.dtype.str)
        if found != (shape, content["types"][name]):
            raise ValueError(f"{name}.npy holds {found}")
        arrays[name] = np.asarray(mapped)
    columns: dict[str, Column] = {}
    for name, kind in content["columns"].items():
        if kind == "strings":
            text, offsets = arrays[f"column.{name}.bytes"], arrays[f"column.{name}.offsets"]
            _check_offsets(offsets, len(text))
            columns[name] = Strings(text, offsets)
        else:
            columns[name] = arrays[f"column.{name}"]
    owners = None
    if content["clients"] is not None:
        _check_offsets(arrays["clients"], content["rows"])
        owners = Owners(tuple(content["clients"]), arrays["clients"])
    return Columns(columns, owners, tuple(content["notes"]))


def _check_offsets(offsets: Array, end: int) -> None:
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
        raise ValueError("offsets are out of order")


def fingerprint(columns: Columns) -> str:
    """Compute the SHA-256 of contents, order, names and clients."""
    digest = hashlib.sha256()
    for name, array in sorted(_arrays(columns).items()):
        digest.update(f"{name}\x1f{array.dtype.str}\x1f{array.shape}\x1e".encode())
        if array.size:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    names = () if columns.owners is None else columns.owners.names
    digest.update("\x1f".join(names).encode(errors="surrogatepass"))
    return digest.hexdigest()
