"""Columns on disk as plain ``.npy`` files that are mapped into memory instead of read.

::

    meta.json                 names, clients, notes and fingerprint
    column.x.npy              one file for each column of numbers
    column.text.bytes.npy     two for each column of strings
    column.text.offsets.npy
    clients.npy               offsets of the clients

``meta.json`` is written last: a directory without it is not complete. No pickle is used.
"""

from __future__ import annotations

import hashlib
import json
import os
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
        directory: a directory to make; after an error it holds a part of the files.
        fill: makes the columns. Arrays that it allocates are mapped to files; others are copied.
    """
    with writing(directory):
        directory.mkdir(parents=True)
        content = _fill(directory, fill)
        (directory / "meta.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        for path in directory.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        sync_directory(directory)
    return str(content["fingerprint"])


def _fill(folder: Path, fill: Callable[[Allocate], Columns]) -> dict[str, Any]:
    """Write the arrays and return the content of ``meta.json``."""
    made: dict[str, Array] = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Map a new file, with its disk space reserved."""
        if np.dtype(dtype).hasobject:
            raise InputError(f"column {name!r} cannot be stored: it holds Python objects")
        path = folder / f"{name}.npy"
        path.unlink(missing_ok=True)  # a reader may allocate a column twice
        array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        if array.size and hasattr(os, "posix_fallocate"):
            # A mapped file that finds the disk full later kills the process.
            with path.open("rb+") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        made[name] = array
        return array

    columns = fill(lambda name, shape, dtype: allocate(f"column.{name}", shape, dtype))
    arrays = _arrays(columns)
    for name, array in arrays.items():
        if made.get(name) is not array:
            allocate(name, array.shape, array.dtype)[...] = array
    for name, array in made.items():
        array.flush()  # type: ignore[attr-defined]
        if name not in arrays:
            (folder / f"{name}.npy").unlink()
    return {
        "format": FORMAT,
        "rows": columns.rows,
        "columns": {
            name: "strings" if isinstance(column, Strings) else "numbers"
            for name, column in columns.columns.items()
        },
        "clients": None if columns.owners is None else list(columns.owners.names),
        "notes": list(columns.notes),
        "fingerprint": fingerprint(columns),
    }


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


def load(directory: Path) -> Columns:
    """Map stored columns into memory; changing them does not change the files."""
    try:
        content = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
        columns: dict[str, Column] = {}
        for name, kind in content["columns"].items():
            if kind == "strings":
                text = _map(directory / f"column.{name}.bytes.npy")
                offsets = _map(directory / f"column.{name}.offsets.npy", len(text))
                columns[name] = Strings(text, offsets)
            else:
                columns[name] = _map(directory / f"column.{name}.npy")
        owners = None
        if content["clients"] is not None:
            offsets = _map(directory / "clients.npy", content["rows"])
            owners = Owners(tuple(content["clients"]), offsets)
        return Columns(columns, owners, tuple(content["notes"]))
    except Exception as error:  # NumPy raises anything on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"stored data {directory} is damaged ({reason}): run 'fedzmg data import' or "
            "'fedzmg data get' again"
        ) from None


def _map(path: Path, end: int | None = None) -> Array:
    """Map an array; offsets must rise from 0 to ``end``."""
    array = np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))
    if end is not None and (array[0] != 0 or array[-1] != end or (np.diff(array) < 0).any()):
        raise ValueError(f"{path.name} is out of order")
    return array


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
