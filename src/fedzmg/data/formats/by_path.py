"""A file or a folder of a user's own, for a look at it: its name says what it is.

To train on it, call its reader: it has options that a name cannot tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedzmg.data.columns import Columns
from fedzmg.data.formats import arrays, image_folder, leaf_json, tabular, tff_h5
from fedzmg.errors import InputError

TABLES = (".csv", ".parquet", ".pq")
READERS: dict[str, Callable[[Path], Columns]] = {
    ".h5": tff_h5.read,
    ".hdf5": tff_h5.read,
    ".json": leaf_json.read,
    ".npz": arrays.read,
}


def is_path(name: str) -> bool:
    """Whether a name means a file or a folder, rather than a data set."""
    path = Path(name)
    known = path.suffix.lower() in (*TABLES, *READERS)
    return known or os.sep in name or path.exists()


def is_table(name: str) -> bool:
    """Whether it is a file with named columns."""
    return Path(name).suffix.lower() in TABLES


def read(name: str, client: str | None = "client", label: str = "label") -> Columns:
    """Labels, clients and, but for tables, inputs of a file or of a folder of images.

    Args:
        name: the path.
        client: a table's column of clients; None if rows belong to nobody yet.
        label: a table's column of labels.

    Raises:
        InputError: for another kind of file, and whatever its reader refuses.
    """
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder: check the path")
    if path.is_dir():
        return image_folder.read(path)
    if is_table(name):
        return tabular.read_labels(path, client=client, label=label)
    kind = path.suffix.lower()
    if kind not in READERS:
        known = ", ".join((*TABLES, *READERS))
        raise InputError(f"{path}: what is it? give a folder of images, or a file named {known}")
    return READERS[kind](path)
