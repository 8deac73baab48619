"""Reader for TensorFlow Federated's HDF5 files, with a group ``examples/<client>`` for each client.

============  ======================================================================
EMNIST        ``pixels`` [n, 28, 28] floats from 0 to 1, ``label`` [n]
CIFAR-100     ``image`` [n, 32, 32, 3] bytes, ``label`` [n], ``coarse_label`` [n]
Shakespeare   ``snippets`` [n] strings
============  ======================================================================

The first client decides the layout. Files come in the order given, clients of a file sorted by
name. Files are read twice: first all shapes, then the values into columns allocated once.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, Paths
from fedzmg.errors import InputError


class _Part(NamedTuple):
    """Column of a dataset that every client has, with one row for each example."""

    column: str
    shape: tuple[int, ...]
    kind: str


_LABEL = _Part("y", (), "whole numbers")
_LAYOUTS = (
    {"pixels": _Part("x", (28, 28), "floats"), "label": _LABEL},
    {
        "image": _Part("x", (32, 32, 3), "bytes"),
        "label": _LABEL,
        "coarse_label": _Part("coarse", (), "whole numbers"),
    },
    {"snippets": _Part("text", (), "strings")},
)
_CODES = {"floats": "f", "bytes": "u", "whole numbers": "iu", "strings": "S"}
"""Kinds of dtype that fit."""


class _Client(NamedTuple):
    """Client of a file."""

    name: str
    where: str
    group: h5py.Group
    rows: slice


def read_h5(paths: Paths, allocate: Allocate = in_memory, *, classes: int | None = None) -> Columns:
    """Read files of one of the three layouts.

    Args:
        paths: files, whose clients are put one after the other.
        allocate: makes the columns: ``x`` and ``y`` (and ``coarse``), or ``text``. It is called
            twice for ``x`` where pixels turn out not to be bytes; only the second one counts.
        classes: labels must be smaller than this.
    """
    files = common.as_paths(paths)
    with contextlib.ExitStack() as stack:
        layout, clients = _survey(files, stack)
        rows = clients[-1].rows.stop if clients else 0
        if rows == 0:
            raise InputError(f"{files[0]}: no client has an example: get the file again")
        notes: list[str] = []
        columns: dict[str, Column] = {}
        for name, part in layout.items():
            if part.kind == "floats":
                columns["x"] = _pixels(clients, rows, allocate, notes)
            elif part.kind == "bytes":
                x = columns["x"] = allocate("x", (rows, 3, 32, 32), np.uint8)
                for client, values in _values(clients, name):
                    x[client.rows] = values.transpose(0, 3, 1, 2)
            else:
                most = classes - 1 if classes and part is _LABEL else 2**63 - 1
                parts: list[Column] = []
                for client, values in _values(clients, name):
                    where = f"{client.where}: {name}"
                    if part.kind == "strings":
                        parts.append(common.pack(values.tolist(), where))
                    else:
                        bad = (values < 0) | (values > most)
                        common.refuse_row(bad, where, values, f"expected 0 to {most}")
                        parts.append(values.astype(np.int64))
                columns[part.column] = common.join(allocate, part.column, parts)
    sizes = [client.rows.stop - client.rows.start for client in clients]
    return common.owned(columns, [client.name for client in clients], sizes, notes)


def _survey(
    paths: Sequence[Path], stack: contextlib.ExitStack
) -> tuple[dict[str, _Part], list[_Client]]:
    """Open all files and check the shape and type of every dataset."""
    layout: dict[str, _Part] = {}
    clients: list[_Client] = []
    done = 0
    for path in paths:
        total = 0
        with common.reading(str(path), REMEDY):
            examples = stack.enter_context(h5py.File(path, "r"))["examples"]
            names = sorted(examples)
        for name in names:
            where = f"{path}: client {name!r}"
            with common.reading(where, REMEDY):
                group = examples[name]
                layout = layout or _detect(group)
                rows, held = _measure(group, layout)
            total += held
            clients.append(_Client(name, where, group, slice(done, done + rows)))
            done += rows
        common.refuse_bomb(str(path), total, path.stat().st_size)
        if "snippets" in layout:
            with common.reading(str(path), REMEDY):
                _check_heap(path, examples.file)
    return layout, clients


def _check_heap(path: Path, file: h5py.File) -> None:
    """Check the sizes in the heap of strings; the HDF5 library loops forever on a size of 0."""
    if file.id.get_create_plist().get_sizes() != (8, 8):
        raise ValueError("does not use 64-bit addresses")
    with path.open("rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(b"GCOL\1")
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


def _detect(group: h5py.Group) -> dict[str, _Part]:
    for layout in _LAYOUTS:
        if all(name in group for name in layout):
            return layout
    known = "; ".join(", ".join(layout) for layout in _LAYOUTS)
    raise ValueError(f"has {', '.join(sorted(group)[:5])}; TFF's layouts are {known}")


def _measure(group: h5py.Group, layout: dict[str, _Part]) -> tuple[int, int]:
    """Return the examples of a client and the bytes of its datasets; check their form."""
    lengths = set()
    held = 0
    for name, part in layout.items():
        # Other links may lead to other files.
        own = isinstance(group.get(name, getlink=True), h5py.HardLink)
        dataset = group[name] if own else None
        if dataset is None or dataset.is_virtual or dataset.external:
            raise ValueError(f"{name!r} is missing or lies in another file")
        dtype = dataset.dtype
        code = dtype.kind if h5py.check_string_dtype(dtype) is None else "S"
        fits = code in _CODES[part.kind] and (part.kind != "bytes" or dtype.itemsize == 1)
        if dataset.shape[1:] != part.shape or not fits:
            raise ValueError(
                f"{name!r} has shape {dataset.shape} of {dtype}: expected {part.kind} "
                f"of shape {('n', *part.shape)}"
            )
        lengths.add(len(dataset))
        held += math.prod(dataset.chunks or (0,)) * dtype.itemsize + dataset.nbytes
    if len(lengths) > 1:
        raise ValueError(f"{', '.join(layout)} differ in length: {sorted(lengths)}")
    return lengths.pop(), held


def _values(clients: Sequence[_Client], name: str) -> Iterator[tuple[_Client, Array]]:
    """Read one dataset of every client that has examples."""
    for client in clients:
        if client.rows.stop > client.rows.start:
            with common.reading(client.where, REMEDY):
                values = client.group[name][:]
            yield client, values


def _pixels(clients: Sequence[_Client], rows: int, allocate: Allocate, notes: list[str]) -> Array:
    """Store fractions as bytes if all of them are multiples of 1/255, else as float32."""
    for dtype in (np.uint8, np.float32):
        column = allocate("x", (rows, 28, 28), dtype)
        for client, values in _values(clients, "pixels"):
            pixels = values.astype(np.float32, copy=False)
            bad = ~((pixels >= 0) & (pixels <= 1))
            if bad.any():
                raise InputError(
                    f"{client.where}: example {np.argwhere(bad)[0, 0]} has a pixel of "
                    f"{pixels[bad][0]:g}: expected values from 0 to 1"
                )
            stored = common.as_bytes(pixels) if dtype == np.uint8 else pixels
            if stored is None:
                notes.append(f"{client.where}: {common.NOT_BYTES}")
                break
            column[client.rows] = stored
        else:
            break
    return column
