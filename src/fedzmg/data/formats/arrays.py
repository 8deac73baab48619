"""Reader for NumPy arrays: in memory, or in one ``.npz`` file."""

import warnings
import zipfile
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats import common
from fedzmg.errors import InputError

_ROLES = {"x": "x", "y": "y", "clients": "clients", "client": "clients"}


def from_arrays(x: Any, y: Any = None, clients: Any = None) -> Columns:
    """Make columns of arrays, or of anything that NumPy makes arrays of; types stay as they are.

    Rows of ``x`` are numbers of any shape, or strings; ``y`` has whole numbers or names of classes,
    ``clients`` whole numbers or strings.
    """
    return _columns("arrays", (), x, y, clients)


def read_arrays(paths: common.Paths) -> Columns:
    """Read one ``.npz`` file with x, y and clients; nothing is unpickled."""
    [path] = common.as_paths(paths, single=True)
    where, found, others = str(path), dict[str, Array](), list[str]()
    with common.reading(where), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            here = f"{where}: array {name!r}"
            if name not in _ROLES:
                others.append(repr(name))
                continue
            common.refuse_bomb(here, info.file_size, info.compress_size)
            old_header = warnings.catch_warnings(action="ignore")  # and damaged ones
            with common.reading(here), archive.open(info) as stream, old_header:
                role = _ROLES[name]
                if role in found:
                    raise InputError(f"{here}: is there twice: remove one")
                found[role] = np.lib.format.read_array(stream, allow_pickle=False)
                if found[role].size == 0 or stream.read(1):
                    raise InputError(f"{here}: is empty, or longer than its shape: write it again")
    if not {"x", "y"} <= set(found):
        raise InputError(f"{where}: no array 'x' or 'y': write numpy.savez(FILE, x=..., y=...)")
    notes = (f"arrays not used: {', '.join(others)}",) if others else ()
    return _columns(where, notes, **found)


def _columns(where: str, notes: Any, x: Any, y: Any = None, clients: Any = None) -> Columns:
    with common.reading(f"{where}: x", "give rows of equal shape"):
        text = isinstance(x, list | tuple) and any(isinstance(row, str | bytes) for row in x)
        values = x if text else np.asarray(x)
        if not text and values.dtype == object:  # the type of its numbers, if it holds nothing else
            numbers = np.array(values.tolist())
            values = numbers if numbers.dtype.kind in "biuf" else values
        if not text and values.ndim == 1 and values.dtype.kind in "USO":
            values, text = values.tolist(), True
        rows = len(values)
    if rows == 0:
        raise InputError(f"{where}: no row: give at least one")
    if not text:
        common.check_numbers(values, f"{where}: x")
    return common.assemble(where, common.by_client(clients, rows, where), values, y, notes=notes)
