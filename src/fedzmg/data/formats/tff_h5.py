"""Reader for TensorFlow Federated's HDF5 files, with a group ``examples/<client>`` for each client.

============  ======================================================================
EMNIST        ``pixels`` [n, 28, 28] floats from 0 to 1, ``label`` [n]
CIFAR-100     ``image`` [n, 32, 32, 3] bytes, ``label`` [n], ``coarse_label`` [n]
Shakespeare   ``snippets`` [n] strings
============  ======================================================================

Files come in the order given, clients of a file sorted by name.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fedzmg.data.columns import Array, Column, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, Client, Paths
from fedzmg.errors import InputError

_DATASETS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "pixels": ("x", (28, 28), "f"),
    "image": ("x", (32, 32, 3), "u"),
    "label": ("y", (), "iu"),
    "coarse_label": ("coarse", (), "iu"),
    "snippets": ("text", (), "S"),
}
"""Column, shape of a row and kinds of dtype of each dataset."""
_LAYOUTS = ({"pixels", "label"}, {"image", "label", "coarse_label"}, {"snippets"})


def read_h5(paths: Paths, *, classes: int | None = None) -> Columns:
    """Read files of one of the three layouts.

    Args:
        paths: files, whose clients are put one after the other.
        classes: labels must be smaller than this.
    """
    files = common.as_paths(paths)
    return common.collect(str(files[0]), _clients(files, classes))


def _clients(paths: Sequence[Path], classes: int | None) -> Iterator[Client]:
    for path in paths:
        claimed = 0
        with common.reading(str(path), REMEDY):
            file = h5py.File(path, "r")
        with file:
            with common.reading(str(path), REMEDY):
                names = sorted(file["examples"])
                if any("snippets" in file["examples"][name] for name in names):
                    _check_heap(path, file)
            for name in names:
                where = f"{path}: client {name!r}"
                with common.reading(where, REMEDY):
                    found = _datasets(file["examples"][name])
                    claimed += sum(
                        math.prod(d.chunks or (0,)) * d.dtype.itemsize + d.nbytes
                        for d in found.values()
                    )
                    common.refuse_bomb(str(path), claimed, path.stat().st_size)
                    filled = len(next(iter(found.values()))) > 0
                    columns = {
                        _DATASETS[key][0]: _column(key, dataset[:], where, classes)
                        for key, dataset in found.items()
                        if filled
                    }
                yield Client(name, where, columns)


def _check_heap(path: Path, file: h5py.File) -> None:
    """Check the sizes in the heap of strings; the HDF5 library loops forever on a size of 0."""
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(b"GCOL\1")
        if start >= 0 and file.id.get_create_plist().get_sizes() != (8, 8):
            raise ValueError("does not use 64-bit addresses")
        while start >= 0:
            (size,) = struct.unpack_from("<Q", data, start + 8)
            at, end = start + 16, start + size
            while at + 16 <= end:
                index, length = struct.unpack_from("<H6xQ", data, at)
                # Object 0 is the free space, whose size includes its header.
                at += 16 + -(-length // 8) * 8 if index else length
                if at > end or (index == 0 and length < 16):
                    raise ValueError("the heap of its strings is damaged")
            start = data.find(b"GCOL\1", start + 16)


def _datasets(group: h5py.Group) -> dict[str, Any]:
    """Return the datasets of a client after checking their form."""
    found = {}
    for name in (name for name in _DATASETS if name in group):
        # Other links may lead to other files.
        own = isinstance(group.get(name, getlink=True), h5py.HardLink)
        dataset = group[name] if own else None
        if dataset is None or dataset.is_virtual or dataset.external:
            raise ValueError(f"{name!r} lies in another file")
        _, shape, kinds = _DATASETS[name]
        dtype = dataset.dtype
        kind = dtype.kind if h5py.check_string_dtype(dtype) is None else "S"
        if dataset.shape[1:] != shape or kind not in kinds or (name == "image" and dtype != "u1"):
            raise ValueError(f"{name!r} has shape {dataset.shape} of {dtype}")
        found[name] = dataset
    lengths = {name: len(dataset) for name, dataset in found.items()}
    if len(set(lengths.values())) != 1 or found.keys() not in _LAYOUTS:
        raise ValueError(f"has {lengths or sorted(group)[:5]}; expected a layout of TFF")
    return found


def _column(name: str, values: Array, where: str, classes: int | None) -> Column:
    if name == "snippets":
        return common.pack(values.tolist(), where)
    if name == "image":
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    if name == "pixels":
        pixels = values.astype(np.float32, copy=False)
        bad = ~((pixels >= 0) & (pixels <= 1))
        if bad.any():
            raise InputError(
                f"{where}: example {np.argwhere(bad)[0, 0]} has a pixel of {pixels[bad][0]:g}: "
                "expected values from 0 to 1"
            )
        small = common.as_bytes(pixels)
        return pixels if small is None else small
    most = classes - 1 if classes and name == "label" else 2**63 - 1
    bad = (values < 0) | (values > most)
    common.refuse_row(bad, f"{where}: {name}", values, f"expected 0 to {most}")
    return values.astype(np.int64)
