"""Registry of file formats; every reader has one signature.

A reader is called as ``read_NAME(paths, **options)`` and returns
:class:`~fedzmg.data.columns.Columns`. It raises :class:`~fedzmg.errors.InputError` for a file that
it cannot use. Readers are imported on first use: HDF5 alone takes a while.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from fedzmg.data.columns import Columns
from fedzmg.errors import InputError

FORMATS = {
    "arrays": "arrays.read_arrays",
    "cifar_binary": "cifar.read_cifar_binary",
    "cifar_python": "cifar.read_cifar_python",
    "h5": "federated_files.read_h5",
    "idx": "mnist.read_idx",
    "image_folder": "image_folder.read_image_folder",
    "leaf": "federated_files.read_leaf",
    "mat": "mnist.read_mat",
    "table": "tabular.read_table",
}
"""Format name to module and function in this package."""
SUFFIXES = {
    ".csv": "table",
    ".parquet": "table",
    ".pq": "table",
    ".h5": "h5",
    ".hdf5": "h5",
    ".json": "leaf",
    ".npz": "arrays",
}
"""File suffixes that tell the format."""


def reader(name: str) -> Callable[..., Columns]:
    """Import the reader of a format in :data:`FORMATS`."""
    module, _, function = FORMATS[name].partition(".")
    found: Callable[..., Columns] = getattr(
        importlib.import_module(f"{__name__}.{module}"), function
    )
    return found


def is_path(name: str) -> bool:
    """Tell whether a name means a file or a folder, rather than a data set."""
    return Path(name).suffix.lower() in SUFFIXES or os.sep in name or Path(name).exists()


def is_table(name: str) -> bool:
    """Tell whether a path is a file with named columns."""
    return SUFFIXES.get(Path(name).suffix.lower()) == "table"


def read_path(name: str, client: str | None = "client", label: str = "label") -> Columns:
    """Read a user's file or folder of images for inspection; the suffix tells the format.

    To train on it, call its reader, which has more options.

    Args:
        name: the path.
        client: a table's client column; None if rows belong to nobody yet.
        label: a table's label column; other columns of a table are not read.
    """
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path")
    if path.is_dir():
        return reader("image_folder")(path)
    if is_table(name):
        return reader("table")(path, client=client, label=label, features=[])
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        known = ", ".join(SUFFIXES)
        raise InputError(
            f"{path}: unknown format: give a folder of images, or a file named {known}"
        )
    return reader(SUFFIXES[kind])(path)
