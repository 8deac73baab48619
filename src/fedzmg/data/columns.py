"""Named columns with one row per example, and the client of each row, in memory and on disk.

Readers (``fedzmg.data.formats``) make columns, the catalog keeps them, partitions and presets turn
them into :class:`~fedzmg.data.federated.FederatedData`. Agreed names: ``x`` (images, as stored),
``y`` (labels, int64), ``coarse`` (coarse labels), ``text`` (strings).

On disk they are ``.npy`` files, mapped into memory instead of read, and ``meta.json`` with names,
clients, notes and fingerprint, written last.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.cache import writing
from fedzmg.errors import InputError
from fedzmg.storage.files import write_atomic

FORMAT = 1
Array: TypeAlias = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class Strings(NamedTuple):
    """UTF-8 strings end to end; row ``i`` is ``text[offsets[i] : offsets[i + 1]]``."""

    text: npt.NDArray[np.uint8]
    offsets: Ids


Column: TypeAlias = Array | Strings


class Owners(NamedTuple):
    """Rows sorted by client: client ``i`` is called ``names[i]``, owns ``offsets[i : i + 2]``."""

    names: tuple[str, ...]
    offsets: npt.NDArray[np.int64]


Grouping: TypeAlias = tuple[Ids, Owners | None]  # rows in the result's order, and their clients


def group(owner: Ids, names: Sequence[str]) -> tuple[Ids, Owners]:
    """Sort rows by client, keeping their order inside a client; ``owner`` indexes ``names``."""
    offsets = np.searchsorted(np.sort(owner), np.arange(len(names) + 1))
    return np.argsort(owner, kind="stable"), Owners(tuple(names), offsets)


@dataclass(frozen=True)
class Columns:
    """Columns of equally many rows; ``owners`` where the file names clients."""

    columns: Mapping[str, Column]
    owners: Owners | None = None
    notes: tuple[str, ...] = ()  # unexpected properties, for the user
    classes: tuple[str, ...] = ()  # names of labels in the order of their ids, if any

    def __post_init__(self) -> None:
        lengths = {name: rows_of(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            raise InputError(f"columns differ in length: {lengths}")
        if self.owners is not None:
            names, offsets = self.owners
            if len(set(names)) != len(names):
                twice = next(n for i, n in enumerate(names) if n in names[:i])
                raise InputError(f"client {twice!r} occurs twice: give each client one name")
            if len(offsets) != len(names) + 1 or offsets[0] != 0 or offsets[-1] != self.rows:
                raise InputError(f"{len(names)} clients do not cover all of {self.rows} rows")

    @property
    def rows(self) -> int:
        return rows_of(next(iter(self.columns.values())))

    @property
    def clients(self) -> int | None:
        return None if self.owners is None else len(self.owners.names)

    def array(self, name: str) -> Array:
        column = self.columns[name]
        assert not isinstance(column, Strings)
        return column

    def strings(self, name: str) -> Strings:
        column = self.columns[name]
        assert isinstance(column, Strings)
        return column

    def take(self, rows: npt.NDArray[np.int64], owners: Owners | None) -> "Columns":
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if not isinstance(column, Strings):
                columns[name] = column[rows]
                continue
            lengths = np.diff(column.offsets)[rows]
            offsets = np.cumsum([0, *lengths], dtype=np.int64)
            starts = np.repeat(column.offsets[rows] - offsets[:-1], lengths)
            columns[name] = Strings(column.text[starts + np.arange(offsets[-1])], offsets)
        return replace(self, columns=columns, owners=owners)

    def __repr__(self) -> str:
        whose = "" if self.owners is None else f" of {len(self.owners.names):,} clients"
        kinds = ", ".join(f"{name} {kind_of(column)}" for name, column in self.columns.items())
        classes = f"; {len(self.classes)} named classes" if self.classes else ""
        return f"<Columns: {self.rows:,} rows{whose}; {kinds}{classes}>"


def rows_of(column: Column) -> int:
    """Count the rows of a column."""
    return len(column.offsets) - 1 if isinstance(column, Strings) else len(column)


def kind_of(column: Any) -> str:
    """Describe shape and type of a row of an array, a tensor or strings."""
    if isinstance(column, Strings):
        return "strings"
    shape = " x ".join(map(str, column.shape[1:]))
    return f"{shape} {str(column.dtype).removeprefix('torch.')}".strip()


def save_columns(directory: Path, columns: Columns) -> str:
    """Write columns to a new directory and return their fingerprint."""
    held = columns.columns.items()
    content = {
        "format": FORMAT, "rows": columns.rows,
        "columns": {n: "strings" if isinstance(c, Strings) else "numbers" for n, c in held},
        "clients": None if columns.owners is None else list(columns.owners.names),
        "notes": list(columns.notes), "fingerprint": fingerprint(columns),
    }  # fmt: skip
    with writing(directory):
        directory.mkdir(parents=True)
        for name, array in _arrays(columns).items():
            with (directory / f"{name}.npy").open("xb") as file:
                try:
                    np.save(file, array, allow_pickle=False)
                except OSError as error:  # NumPy counts the bytes but does not say why
                    full = error.errno or errno.ENOSPC
                    raise OSError(full, os.strerror(full)) from None
                os.fsync(file.fileno())
        write_atomic(directory / "meta.json", json.dumps(content, indent=1).encode())
    return str(content["fingerprint"])


def _arrays(columns: Columns) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, column in columns.columns.items():
        plain = isinstance(column, Strings) or not column.dtype.hasobject
        if not name.isidentifier() or not plain:
            raise InputError(f"column {name!r} cannot be stored: use letters, no Python objects")
        if isinstance(column, Strings):
            arrays[f"column.{name}.bytes"] = column.text
            arrays[f"column.{name}.offsets"] = column.offsets
        else:
            arrays[f"column.{name}"] = column
    if columns.owners is not None:
        arrays["clients"] = columns.owners.offsets
    return arrays


def load_columns(directory: Path) -> Columns:
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
        remedy = "run 'fedzmg data import' or 'fedzmg data get' again"
        raise InputError(f"stored data {directory} is damaged ({reason}): {remedy}") from None


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
