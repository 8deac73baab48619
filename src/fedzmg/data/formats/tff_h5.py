"""TensorFlow Federated's HDF5 files: a group ``examples/<client>`` with datasets for each client.

============  ======================================================================
EMNIST        ``pixels`` [n, 28, 28] floats from 0 to 1, ``label`` [n]
CIFAR-100     ``image`` [n, 32, 32, 3] bytes, ``label`` [n], ``coarse_label`` [n]
Shakespeare   ``snippets`` [n] strings
============  ======================================================================

The first client decides which layout it is. Files come in the order given and the clients of a
file in the order of their names; examples are counted from 0. A file is surveyed first, so that
columns are made once and filled in place, some MiB at a time.
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
from h5py import h5d, h5f, h5g, h5l, h5o, h5s, h5z

from fedzmg.data.columns import Allocate, Array, Column, Columns, Owners, Strings, in_memory
from fedzmg.data.formats.pixels import NOT_BYTES, as_bytes, check_fractions
from fedzmg.data.formats.rows import Paths, as_paths, file_size, reading, refuse_bomb
from fedzmg.errors import InputError

_REMEDY = "is it complete? get the file again"
_BLOCK = 2**24
_BLOCK_STRINGS = 2**12
_PLAIN = (h5d.COMPACT, h5d.CONTIGUOUS, h5d.CHUNKED)
_HEAP = b"GCOL\x01"
_FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_SHUFFLE: "shuffle", h5z.FILTER_LZF: "lzf"}


class _Part(NamedTuple):
    """A dataset that every client has, with one row for each example."""

    dataset: str
    column: str
    shape: tuple[int, ...]
    fits: Callable[[np.dtype[Any]], bool]
    expected: str


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f"


def _is_byte(dtype: np.dtype[Any]) -> bool:
    return dtype == np.uint8


def _is_whole(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu"


def _is_string(dtype: np.dtype[Any]) -> bool:
    return h5py.check_string_dtype(dtype) is not None


_LABEL = _Part("label", "y", (), _is_whole, "whole numbers")
_COARSE = _Part("coarse_label", "coarse", (), _is_whole, "whole numbers")
_LAYOUTS = {
    "EMNIST": (_Part("pixels", "x", (28, 28), _is_float, "floats"), _LABEL),
    "CIFAR-100": (_Part("image", "x", (32, 32, 3), _is_byte, "bytes"), _LABEL, _COARSE),
    "Shakespeare": (_Part("snippets", "text", (), _is_string, "strings"),),
}


class _File(NamedTuple):
    """A file as surveyed: its clients and how many examples each of them has."""

    path: Path
    examples: h5g.GroupID
    clients: dict[str, int]


class _Block(NamedTuple):
    """Some examples of one client, and their place in the column."""

    client: str
    example: int
    rows: slice
    values: Array

    def place(self, row: int) -> str:
        """How a message names one of the examples."""
        return f"{self.client}: example {self.example + row}"


class _NotBytes(Exception):
    """Pixels that only floats can hold; says where."""


def read(paths: Paths, allocate: Allocate = in_memory, *, classes: int | None = None) -> Columns:
    """Read files of one of the three layouts.

    Args:
        paths: files, whose clients are put one after the other.
        allocate: makes the columns: ``x`` and ``y`` (and ``coarse``), or ``text``. It is asked
            twice for ``x`` where pixels turn out not to be bytes; only the second one counts.
        classes: labels must be smaller than this.

    Raises:
        InputError: for a damaged file, missing or unequal datasets, pixels or labels out of range,
            text that is not UTF-8, a client that occurs twice, or no example at all.
    """
    given = as_paths(paths)
    if not given:
        raise InputError("no HDF5 file given: name at least one")
    with contextlib.ExitStack() as stack:
        layout, files = _survey(given, stack)
        names = tuple(name for file in files for name in file.clients)
        counts = [rows for file in files for rows in file.clients.values()]
        owners = Owners(names, np.cumsum([0, *counts], dtype=np.int64))
        notes = []
        if 0 in counts:
            first = names[counts.index(0)]
            notes.append(f"clients without any example: {counts.count(0)}, the first is {first!r}")
        columns: dict[str, Column] = {}
        for part in layout:
            if part.fits is _is_string:
                columns[part.column] = _text(files, part, allocate)
            elif part.fits is _is_whole:
                most = classes if part is _LABEL else None
                columns[part.column] = _labels(files, part, allocate, most)
            elif part.fits is _is_byte:
                columns[part.column] = _images(files, part, allocate)
            else:
                columns[part.column], said = _pixels(files, part, allocate)
                notes += said
    return Columns(columns, owners, tuple(notes))


def _survey(
    paths: Sequence[Path], stack: contextlib.ExitStack
) -> tuple[tuple[_Part, ...], list[_File]]:
    """Open all files; what every client holds, and how much of it."""
    files: list[_File] = []
    layout: tuple[_Part, ...] = ()
    for path in paths:
        size = file_size(path)
        with reading(str(path), _REMEDY):
            file = stack.enter_context(h5py.File(path, "r"))
            _cap_metadata(file.id)
            if file.id.get_create_plist().get_sizes() != (8, 8):
                raise InputError(f"{path}: has addresses of unusual size: {_REMEDY}")
            examples = _open(file.id, b"examples", h5g.GroupID, str(path))
            names = sorted(examples)
        if not names:
            raise InputError(f"{path}: group 'examples' holds no client: get the file again")
        clients: dict[str, int] = {}
        total = 0
        for raw in names:
            name = _name(raw, path)
            for earlier in files:
                if name in earlier.clients:
                    raise InputError(
                        f"client {name!r} occurs in {earlier.path} and in {path}: rename one, or "
                        "give only one of the files"
                    )
            where = f"{path}: client {name!r}"
            with reading(where, _REMEDY):
                group = _open(examples, raw, h5g.GroupID, str(path))
                layout = layout or _detect(group, where)
                clients[name], held = _measure(group, layout, where, size)
            total += held
        refuse_bomb(str(path), total, size)
        files.append(_File(path, examples, clients))
    if not any(rows for file in files for rows in file.clients.values()):
        raise InputError(f"{paths[0]}: no client has an example: get the file again")
    return layout, files


def _cap_metadata(file: h5f.FileID) -> None:
    """Keep little of what was surveyed: it is seen twice, and grows to 150 MiB for EMNIST."""
    config = file.get_mdc_config()
    config.set_initial_size = True
    config.initial_size = config.min_size = config.max_size = 2**20
    config.flash_incr_mode = 0
    file.set_mdc_config(config)


def _name(raw: bytes, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InputError(
            f"{path}: client {raw!r} has a name that is not UTF-8: rename it"
        ) from None


def _open(parent: Any, name: bytes, kind: type, where: str) -> Any:
    """A group or dataset that lies in the same file."""
    sort = "group" if kind is h5g.GroupID else "dataset"
    said = name.decode(errors="replace")
    found = parent if isinstance(parent, h5g.GroupID) else h5g.open(parent, b"/")
    if name not in found:
        has = sorted(found)
        if name in has:
            raise InputError(f"{where}: lists {said!r} but does not hold it: {_REMEDY}")
        raise InputError(
            f"{where}: has no {sort} {said!r} (it has {_listed(has)}): give a file in the layout "
            "of TensorFlow Federated"
        )
    # Other links may lead to other files, or nowhere.
    if found.links.get_info(name).type != h5l.TYPE_HARD:
        raise InputError(f"{where}: {said!r} is only a link: store the {sort} itself")
    opened = h5o.open(found, name)
    if not isinstance(opened, kind):
        raise InputError(f"{where}: {said!r} is no {sort}: {_REMEDY}")
    return opened


def _listed(names: Sequence[bytes]) -> str:
    shown = ", ".join(repr(name.decode(errors="replace")) for name in names[:5])
    return f"{shown} and {len(names) - 5} others" if len(names) > 5 else shown or "nothing"


def _detect(group: h5g.GroupID, where: str) -> tuple[_Part, ...]:
    has = sorted(group)
    for layout in _LAYOUTS.values():
        if all(part.dataset.encode() in has for part in layout):
            return layout
    known = "; ".join(
        f"{name}: {', '.join(part.dataset for part in layout)}" for name, layout in _LAYOUTS.items()
    )
    raise InputError(
        f"{where}: has {_listed(has)}, which is none of the layouts of TensorFlow Federated "
        f"({known})"
    )


def _measure(
    group: h5g.GroupID, layout: tuple[_Part, ...], where: str, size: int
) -> tuple[int, int]:
    """Examples of a client, and how many bytes its datasets hold; checks their form."""
    lengths: dict[str, int] = {}
    held = 0
    for part in layout:
        dataset = _open(group, part.dataset.encode(), h5d.DatasetID, where)
        shape, dtype = dataset.shape, dataset.dtype
        if shape is None or len(shape) != 1 + len(part.shape) or shape[1:] != part.shape:
            expected = ", ".join(["n", *map(str, part.shape)])
            raise InputError(f"{where}: {part.dataset!r} has shape {shape}: expected [{expected}]")
        if not part.fits(dtype):
            raise InputError(
                f"{where}: {part.dataset!r} has type {dtype}: expected {part.expected}"
            )
        lengths[part.dataset] = shape[0]
        # In the file a string is its length and where it lies, in 16 bytes.
        width = (16 if dtype.kind == "O" else dtype.itemsize) * math.prod(part.shape)
        held += shape[0] * width
        _check_storage(dataset, shape, shape[0] * width, f"{where}: {part.dataset!r}", size)
    if len(set(lengths.values())) != 1:
        said = ", ".join(f"{rows} of {name!r}" for name, rows in lengths.items())
        raise InputError(f"{where}: holds {said}: expected equally many; {_REMEDY}")
    return shape[0], held


def _check_storage(
    dataset: h5d.DatasetID, shape: tuple[int, ...], held: int, where: str, size: int
) -> None:
    """Refuse data that was never written, lies in another file, or claims to be huge."""
    if held == 0:
        return
    stored = min(dataset.get_storage_size(), size)
    plan = dataset.get_create_plist()
    layout = plan.get_layout()
    if layout not in _PLAIN or (layout == h5d.CONTIGUOUS and plan.get_external_count()):
        raise InputError(f"{where} lies in another file: store it in this one")
    chunk = plan.get_chunk() if layout == h5d.CHUNKED else shape
    pieces = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    if stored == 0 or (layout == h5d.CHUNKED and dataset.get_num_chunks() < pieces):
        raise InputError(f"{where} was not written to its end: {_REMEDY}")
    for i in range(plan.get_nfilters()):
        if plan.get_filter(i)[0] not in _FILTERS:
            raise InputError(
                f"{where} is packed in an unusual way: store it plain, or with "
                f"{', '.join(_FILTERS.values())}"
            )
    width = held // math.prod(shape)
    refuse_bomb(where, max(held, math.prod(chunk) * width), stored)


def _blocks(files: Sequence[_File], part: _Part, dtype: Any) -> Iterator[_Block]:
    """All rows in order, a client or some MiB at a time; a block is gone when the next one comes.

    Without ``dtype`` the values are strings, as bytes.
    """
    step = max(1, _BLOCK // (dtype.itemsize * math.prod(part.shape))) if dtype else _BLOCK_STRINGS
    buffer = np.empty((step if dtype else 0, *part.shape), dtype)
    done = 0
    for file in files:
        for name, rows in file.clients.items():
            where = f"{file.path}: client {name!r}"
            for first in range(0, rows, step):
                count = min(step, rows - first)
                with reading(where, _REMEDY):
                    if first == 0:
                        dataset = h5d.open(file.examples, f"{name}/{part.dataset}".encode())
                    if dtype is None:
                        values = h5py.Dataset(dataset)[first : first + count]
                    else:
                        values = buffer[:count]
                        _read_rows(dataset, first, rows, values)
                yield _Block(where, first, slice(done, done + count), values)
                done += count


def _read_rows(dataset: h5d.DatasetID, first: int, rows: int, values: Array) -> None:
    if len(values) == rows:
        dataset.read(h5s.ALL, h5s.ALL, values)
        return
    space = dataset.get_space()
    space.select_hyperslab((first, *[0] * (values.ndim - 1)), values.shape)
    dataset.read(h5s.create_simple(values.shape), space, values)


def _rows(files: Sequence[_File]) -> int:
    return sum(rows for file in files for rows in file.clients.values())


def _labels(files: Sequence[_File], part: _Part, allocate: Allocate, classes: int | None) -> Array:
    column = allocate(part.column, (_rows(files),), np.int64)
    for block in _blocks(files, part, np.dtype(np.int64)):
        values = block.values
        high = np.inf if classes is None else classes
        if values.min() < 0 or values.max() >= high:
            row = int(np.argmax((values < 0) | (values >= high)))
            allowed = "a number from 0" if classes is None else f"0 to {classes - 1}"
            raise InputError(
                f"{block.place(row)} has {part.dataset} {values[row]}: expected {allowed}"
            )
        column[block.rows] = values
    return column


def _images(files: Sequence[_File], part: _Part, allocate: Allocate) -> Array:
    height, width, colours = part.shape
    column = allocate(part.column, (_rows(files), colours, height, width), np.uint8)
    for block in _blocks(files, part, np.dtype(np.uint8)):
        column[block.rows] = block.values.transpose(0, 3, 1, 2)
    return column


def _pixels(files: Sequence[_File], part: _Part, allocate: Allocate) -> tuple[Array, list[str]]:
    shape = (_rows(files), *part.shape)
    try:
        return _fill_bytes(files, part, allocate(part.column, shape, np.uint8)), []
    except _NotBytes as error:
        note = f"{error}: {NOT_BYTES}"
    column = allocate(part.column, shape, np.float32)
    for block in _blocks(files, part, np.dtype(np.float32)):
        check_fractions(block.values, block.place)
        column[block.rows] = block.values
    return column, [note]


def _fill_bytes(files: Sequence[_File], part: _Part, column: Array) -> Array:
    for block in _blocks(files, part, np.dtype(np.float32)):
        check_fractions(block.values, block.place)
        values = as_bytes(block.values)
        if values is None:
            raise _NotBytes(block.client)
        column[block.rows] = values
    return column


def _text(files: Sequence[_File], part: _Part, allocate: Allocate) -> Strings:
    """Snippets end to end; they are read twice, first for their lengths."""
    for file in files:
        with reading(str(file.path), _REMEDY):
            _check_heaps(file.path)
    rows = _rows(files)
    offsets = allocate(f"{part.column}.offsets", (rows + 1,), np.int64)
    offsets[0] = total = 0
    most = sum(file_size(file.path) for file in files)
    for block in _blocks(files, part, None):
        for row, snippet in enumerate(block.values):
            try:
                snippet.decode()
            except UnicodeDecodeError:
                raise InputError(
                    f"{block.client}: snippet {block.example + row} is not UTF-8: correct it"
                ) from None
            total += len(snippet)
            offsets[block.rows.start + row + 1] = total
        refuse_bomb(block.client, total, most)
    text = allocate(f"{part.column}.text", (total,), np.uint8)
    for block in _blocks(files, part, None):
        joined = np.frombuffer(b"".join(block.values), np.uint8)
        begin = offsets[block.rows.start]
        text[begin : begin + len(joined)] = joined
    return Strings(text, offsets)


def _check_heaps(path: Path) -> None:
    """Refuse a damaged heap of strings.

    The HDF5 library does not move on from free space of zero bytes, and cannot be interrupted
    there, so every heap is walked before it sees one.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        steps = 0
        heap = data.find(_HEAP)
        while 0 <= heap <= len(data) - 16:
            end = heap + int.from_bytes(data[heap + 8 : heap + 16], "little")
            place = heap + 16
            while place <= min(end, len(data)) - 16:
                number, length = struct.unpack_from("<H6xQ", data, place)
                step = 16 + -(-length // 8) * 8 if number else length
                steps += 1
                # Heaps do not overlap, so there is a bound to how much is in them.
                if step == 0 or place + step > end or steps > len(data) // 16:
                    raise InputError(f"{path}: its strings are damaged at byte {place}: {_REMEDY}")
                place += step
            heap = data.find(_HEAP, heap + 1)
