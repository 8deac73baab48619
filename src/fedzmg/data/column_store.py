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

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from fedzmg.data.cache import writing
from fedzmg.data.columns import Array, Column, Columns, Owners, Strings
from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic

FORMAT = 1


def save(directory: Path, columns: Columns) -> str:
    """Write columns to a new directory and return their fingerprint."""
    content = {
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
    with writing(directory):
        directory.mkdir(parents=True)
        for name, array in _arrays(columns).items():
            with (directory / f"{name}.npy").open("xb") as file:
                try:
                    np.save(file, array, allow_pickle=False)
                except OSError as error:  # NumPy counts the bytes but does not say why
                    raise OSError(error.errno or errno.ENOSPC, str(error)) from None
                os.fsync(file.fileno())
        write_atomic(directory / "meta.json", json.dumps(content, indent=1).encode())
    return str(content["fingerprint"])


def _arrays(columns: Columns) -> dict[str, Array]:
    """Return every array under the name of its file."""
    arrays: dict[str, Array] = {}
    for name, column in columns.columns.items():
        plain = isinstance(column, Strings) or not column.dtype.hasobject
        if not name.isidentifier() or not plain:
            raise InputError(
                f"column {name!r} cannot be stored: use a name of letters, and no Python objects"
            )
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
