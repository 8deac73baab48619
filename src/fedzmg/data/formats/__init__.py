"""File formats; every reader has one signature.

A reader is called as ``read_NAME(paths, **options)`` and returns
:class:`~fedzmg.data.columns.Columns`. It raises :class:`~fedzmg.errors.InputError` for a file that
it cannot use. Readers are imported on first use: HDF5 alone takes a while.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fedzmg.data.columns import Columns
from fedzmg.errors import InputError

SUFFIXES = {
    ".csv": "tabular.read_table", ".parquet": "tabular.read_table", ".pq": "tabular.read_table",
    ".h5": "federated_files.read_h5", ".hdf5": "federated_files.read_h5",
    ".json": "federated_files.read_leaf", ".npz": "arrays.read_arrays",
}  # fmt: skip


def reader(name: str) -> Callable[..., Columns]:
    """Import a reader by module and function, such as ``images.read_idx``."""
    module, _, function = name.partition(".")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return cast(Callable[..., Columns], found)


def is_path(name: str) -> bool:
    """Tell whether a name means a file or a folder, rather than a data set."""
    return Path(name).suffix.lower() in SUFFIXES or os.sep in name or Path(name).exists()


def is_table(name: str) -> bool:
    """Tell whether a path is a file with named columns."""
    return SUFFIXES.get(Path(name).suffix.lower()) == "tabular.read_table"


def read_path(name: str, client: str | None = "client", label: str = "label") -> Columns:
    """Read a user's file or folder of images for inspection; the suffix tells the format.

    ``client`` and ``label`` are columns of a table, whose other columns are not read; rows without
    a client column belong to nobody yet. To train on it, call its reader, which has more options.
    """
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path")
    if path.is_dir():
        return reader("image_folder.read_image_folder")(path)
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        wanted = f"give a folder of images, or a file named {', '.join(SUFFIXES)}"
        raise InputError(f"{path}: unknown format: {wanted}")
    options: dict[str, Any] = {"client": client, "label": label, "features": []}
    return reader(found)(path, **(options if is_table(name) else {}))
