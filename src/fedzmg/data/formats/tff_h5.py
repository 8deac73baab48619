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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, Owners, Strings, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, Paths
from fedzmg.errors import InputError


class _Part(NamedTuple):
    """Dataset that every client has, with one row for each example."""

    dataset: str
    column: str
    shape: tuple[int, ...]
    kinds: str
    """Kinds of dtype that fit, in words."""


_FITS: dict[str, Callable[[np.dtype[Any]], bool]] = {
    "floats": lambda dtype: dtype.kind == "f",
    "bytes": lambda dtype: dtype == np.uint8,
    "whole numbers": lambda dtype: dtype.kind in "iu",
    "strings": lambda dtype: h5py.check_string_dtype(dtype) is not None,
}
_LABEL = _Part("label", "y", (), "whole numbers")
_LAYOUTS = (
    (_Part("pixels", "x", (28, 28), "floats"), _LABEL),
    (
        _Part("image", "x", (32, 32, 3), "bytes"),
        _LABEL,
        _Part("coarse_label", "coarse", (), "whole numbers"),
    ),
    (_Part("snippets", "text", (), "strings"),),
)


class _Client(NamedTuple):
    """Client of a file."""

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
    files = common.as_paths(paths, "HDF5 file")
    with contextlib.ExitStack() as stack:
        layout, clients, names = _survey(files, stack)
        counts = [client.rows.stop - client.rows.start for client in clients]
        if not any(counts):
            raise InputError(f"{files[0]}: no client has an example: get the file again")
        notes = []
        if 0 in counts:
            first = names[counts.index(0)]
            notes.append(f"clients without any example: {counts.count(0)}, the first is {first!r}")
        columns: dict[str, Column] = {}
        for part in layout:
            if part.kinds == "strings":
                columns[part.column] = _text(clients, part, allocate)
            elif part.kinds == "whole numbers":
                most = classes if part is _LABEL else None
                columns[part.column] = _labels(clients, part, allocate, most)
            elif part.kinds == "bytes":
                x = columns[part.column] = allocate("x", (sum(counts), 3, 32, 32), np.uint8)
                for client, values in _values(clients, part):
                    x[client.rows] = values.transpose(0, 3, 1, 2)
            else:
                columns[part.column], note = _pixels(clients, part, allocate)
                notes += note
    owners = Owners(tuple(names), np.cumsum([0, *counts], dtype=np.int64))
    return Columns(columns, owners, tuple(notes))


def _survey(
    paths: Sequence[Path], stack: contextlib.ExitStack
) -> tuple[Sequence[_Part], list[_Client], list[str]]:
    """Open all files and check the shape and type of every dataset."""
    layout: Sequence[_Part] = ()
    clients: list[_Client] = []
    origin: dict[str, Path] = {}
    done = 0
    for path in paths:
        size, total = common.file_size(path), 0
        with common.reading(str(path), REMEDY):
            file = stack.enter_context(h5py.File(path, "r"))
            if file.get("examples", getclass=True) is not h5py.Group:
                raise InputError(f"{path}: has no group 'examples': give a file in TFF's layout")
            names = sorted(file["examples"])
        if not names:
            raise InputError(f"{path}: group 'examples' holds no client: get the file again")
        for name in names:
            where = f"{path}: client {name!r}"
            if name in origin:
                raise InputError(
                    f"client {name!r} occurs in {origin[name]} and in {path}: rename one"
                )
            origin[name] = path
            with common.reading(where, REMEDY):
                group = file["examples"][name]
                layout = layout or _detect(group, where)
                rows, held = _measure(group, layout, where)
            total += held
            clients.append(_Client(where, group, slice(done, done + rows)))
            done += rows
        common.refuse_bomb(str(path), total, size)
        if layout[0].kinds == "strings":
            with common.reading(str(path), REMEDY):
                _check_heap(path, file)
    return layout, clients, list(origin)


def _check_heap(path: Path, file: h5py.File) -> None:
    """Check the sizes in the heap of strings; the HDF5 library loops forever on a size of 0."""
    if file.id.get_create_plist().get_sizes() != (8, 8):
        raise InputError(f"{path}: does not use 64-bit addresses: write it again with h5py")
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
                    raise InputError(f"{path}: the heap of its strings is damaged: {REMEDY}")
            start = data.find(b"GCOL\1", start + 16)


def _detect(group: Any, where: str) -> Sequence[_Part]:
    for layout in _LAYOUTS:
        if all(part.dataset in group for part in layout):
            return layout
    known = "; ".join(", ".join(part.dataset for part in layout) for layout in _LAYOUTS)
    has = ", ".join(sorted(group)[:5]) or "nothing"
    raise InputError(f"{where}: has {has}; expected one of TFF's layouts ({known})")


def _measure(group: Any, layout: Sequence[_Part], where: str) -> tuple[int, int]:
    """Return the examples of a client and the bytes of its datasets; check their form."""
    lengths: dict[str, int] = {}
    held = 0
    for part in layout:
        # Other links may lead to other files.
        if not isinstance(group.get(part.dataset, getlink=True), h5py.HardLink):
            raise InputError(f"{where}: has no dataset {part.dataset!r} of its own: {REMEDY}")
        dataset = group[part.dataset]
        if dataset.is_virtual or dataset.external:
            raise InputError(f"{where}: {part.dataset!r} lies in another file: store it in this")
        if dataset.ndim != 1 + len(part.shape) or dataset.shape[1:] != part.shape:
            expected = ", ".join(["n", *map(str, part.shape)])
            raise InputError(
                f"{where}: {part.dataset!r} has shape {dataset.shape}: expected [{expected}]"
            )
        if not _FITS[part.kinds](dataset.dtype):
            raise InputError(
                f"{where}: {part.dataset!r} has type {dataset.dtype}: expected {part.kinds}"
            )
        lengths[part.dataset] = len(dataset)
        held += math.prod(dataset.chunks or (0,)) * dataset.dtype.itemsize + dataset.nbytes
    if len(set(lengths.values())) != 1:
        counts = ", ".join(f"{rows} of {name!r}" for name, rows in lengths.items())
        raise InputError(f"{where}: holds {counts}: expected equally many; {REMEDY}")
    return len(dataset), held


def _values(clients: Sequence[_Client], part: _Part) -> Iterator[tuple[_Client, Array]]:
    """Read one dataset of every client that has examples."""
    for client in clients:
        if client.rows.stop > client.rows.start:
            with common.reading(client.where, REMEDY):
                values = client.group[part.dataset][:]
            yield client, values


def _labels(
    clients: Sequence[_Client], part: _Part, allocate: Allocate, classes: int | None
) -> Array:
    column = allocate(part.column, (clients[-1].rows.stop,), np.int64)
    most = 2**63 - 1 if classes is None else classes - 1
    for client, values in _values(clients, part):
        bad = (values < 0) | (values > most)
        where = f"{client.where}: {part.dataset}"
        common.refuse_row(bad, where, values, f"expected 0 to {most}")
        column[client.rows] = values
    return column


def _pixels(
    clients: Sequence[_Client], part: _Part, allocate: Allocate
) -> tuple[Array, tuple[str, ...]]:
    """Store fractions as bytes if all of them are multiples of 1/255, else as float32."""
    note: tuple[str, ...] = ()
    for dtype in (np.uint8, np.float32):
        column = allocate(part.column, (clients[-1].rows.stop, *part.shape), dtype)
        for client, values in _values(clients, part):
            pixels = values.astype(np.float32, copy=False)
            common.check_fractions(pixels, client.where)
            stored = common.as_bytes(pixels) if dtype == np.uint8 else pixels
            if stored is None:
                note = (f"{client.where}: {common.NOT_BYTES}",)
                break
            column[client.rows] = stored
        else:
            break
    return column, note


def _text(clients: Sequence[_Client], part: _Part, allocate: Allocate) -> Strings:
    """Store snippets end to end; they are read twice, first for their lengths."""
    offsets = allocate(f"{part.column}.offsets", (clients[-1].rows.stop + 1,), np.int64)
    offsets[0] = total = 0
    for client, values in _values(clients, part):
        for row, snippet in enumerate(values):
            try:
                snippet.decode()
            except UnicodeDecodeError:
                raise InputError(f"{client.where}: snippet {row} is not UTF-8") from None
            total += len(snippet)
            offsets[client.rows.start + row + 1] = total
    text = allocate(f"{part.column}.text", (total,), np.uint8)
    for client, values in _values(clients, part):
        begin, end = offsets[client.rows.start], offsets[client.rows.stop]
        text[begin:end] = np.frombuffer(b"".join(values), np.uint8)
    return Strings(text, offsets)
