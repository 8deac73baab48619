"""Readers for files that hold one client after the other: TFF's HDF5 and LEAF's JSON.

HDF5 has a group ``examples/<client>`` for each client. Files come in the order given, clients of a
file sorted by name.

============  ======================================================================
EMNIST        ``pixels`` [n, 28, 28] floats from 0 to 1, ``label`` [n]
CIFAR-100     ``image`` [n, 32, 32, 3] bytes, ``label`` [n], ``coarse_label`` [n]
Shakespeare   ``snippets`` [n] strings
============  ======================================================================

JSON comes in one or more files ("shards") that hold different users::

    {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}

Other keys, like "hierarchies", are not used. Rows of ``x`` are flat lists of numbers, single
numbers, or strings. 784 numbers are an image of 28 by 28, and fractions that are multiples of
1/255 become bytes. Labels are whole numbers; a string as target, such as the next character of a
play, goes to the column ``next``. Clients come in the order of "users", shards in the order given.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Column, Columns, Owners, Strings, rows_of
from fedzmg.data.formats import common
from fedzmg.errors import InputError

Client: TypeAlias = tuple[str, str, Mapping[str, Column]]  # name, in messages, and columns if any
_DATASETS: dict[str, tuple[str, tuple[int, ...], str]] = {  # column, shape, kinds of dtype
    "pixels": ("x", (28, 28), "f"), "image": ("x", (32, 32, 3), "u"), "label": ("y", (), "iu"),
    "coarse_label": ("coarse", (), "iu"), "snippets": ("text", (), "S"),
}  # fmt: skip
_LAYOUTS = ({"pixels", "label"}, {"image", "label", "coarse_label"}, {"snippets"})
_LEAF = "give LEAF's lists users and num_samples and its table user_data, or get the file again"
_USER = "give lists x and y of equal length, their length in num_samples, and rows of equal length"


def read_h5(paths: common.Paths, *, classes: int | None = None) -> Columns:
    """Read files of one of the three layouts; labels must be smaller than ``classes``."""
    files = common.as_paths(paths)
    return _collect(str(files[0]), _clients(files, classes))


def _clients(paths: Sequence[Path], classes: int | None) -> Iterator[Client]:
    for path in paths:
        claimed = 0
        with common.reading(str(path), common.REMEDY):
            file = h5py.File(path, "r")
        with file:
            with common.reading(str(path), common.REMEDY):
                names = sorted(file["examples"])
                if any("snippets" in file["examples"][name] for name in names):
                    _check_heap(path, file)
            for name in names:
                where = f"{path}: client {name!r}"
                with common.reading(where, common.REMEDY):
                    found = _datasets(file["examples"][name])
                    for d in found.values():
                        claimed += math.prod(d.chunks or (0,)) * d.dtype.itemsize + d.nbytes
                    common.refuse_bomb(str(path), claimed, path.stat().st_size)
                    columns = {
                        _DATASETS[key][0]: _column(key, dataset[:], where, classes)
                        for key, dataset in found.items()
                        if len(dataset)
                    }
                yield name, where, columns


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
            problem = f"example {np.argwhere(bad)[0, 0]} has a pixel of {pixels[bad][0]:g}"
            raise InputError(f"{where}: {problem}: expected values from 0 to 1")
        small = as_bytes(pixels)
        return pixels if small is None else small
    most = classes - 1 if classes and name == "label" else 2**63 - 1
    bad = (values < 0) | (values > most)
    common.refuse_row(bad, f"{where}: {name}", values, f"expected 0 to {most}")
    return values.astype(np.int64)


def read_leaf(paths: common.Paths) -> Columns:
    """Read shards of one data set; each shard is held in memory while it is read."""
    files = common.as_paths(paths)
    return _collect(str(files[0]), _users(files))


def _users(paths: Sequence[Path]) -> Iterator[Client]:
    for path in paths:
        with common.reading(str(path), _LEAF):
            content = json.loads(path.read_bytes().decode("utf-8-sig"))
            names, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
            names = common.as_strings(names, f"{path}: users")
            if len(names) != len(counts) or sorted(names) != sorted(data):
                sizes = f"{len(names)} users, {len(counts)} num_samples, {len(data)} user_data"
                raise InputError(f"{path}: has {sizes}: list every user once in each")
        for name, count in zip(names, counts, strict=True):
            where = f"{path}: user {name!r}"
            with common.reading(where, _USER):
                # Popped, to free the shard while the columns grow.
                user = data.pop(name)
                x, y = user["x"], user["y"]
                lists = isinstance(x, list) and isinstance(y, list)
                if not lists or not len(x) == len(y) == count:
                    raise ValueError(f"x, y and num_samples {count} differ in length")
                columns = _user_columns(x, y, where) if x else {}
            yield name, where, columns


def _user_columns(x: list[Any], y: list[Any], where: str) -> dict[str, Column]:
    text, next_text = (set(map(type, values)) == {str} for values in (x, y))
    if text and next_text:
        return {"text": common.pack(x, f"{where}: x"), "next": common.pack(y, f"{where}: y")}
    labels, names = common.labels(y, where)
    if names:
        raise InputError(f"{where}: label {names[0]!r:.40}: give whole numbers from 0")
    inputs = common.pack(x, f"{where}: x") if text else _numbers(x, f"{where}: x")
    return {"text" if text else "x": inputs, "y": labels}


def _numbers(rows: list[Any], where: str) -> Array:
    """Convert rows of numbers: whole numbers stay whole, fractions become bytes if they can."""
    array = np.array(rows)
    if array.ndim > 2 or array.size == 0 or array.dtype.kind not in "if":
        given = f"has shape {array.shape} of {array.dtype}"
        raise InputError(f"{where}: {given}: give rows of numbers or text")
    if array.ndim == 2 and array.shape[1] == 784:
        array = array.reshape(-1, 28, 28)
    if array.dtype.kind == "i":
        return array
    numbers = common.as_float32(array, where)
    small = as_bytes(array) if array.min() >= 0 and array.max() <= 1 else None
    return numbers if small is None else small


def _collect(where: str, found: Iterable[Client]) -> Columns:
    clients: dict[str, tuple[str, Mapping[str, Column]]] = {}
    for name, here, held in found:
        if name in clients:
            first_file = clients[name][0].rpartition(": ")[0]
            raise InputError(f"{here} is also in {first_file}: leave one of them out")
        clients[name] = here, held
    filled = [(here, held) for here, held in clients.values() if held]
    if not filled:
        raise InputError(f"{where}: no client has an example: get the file again")
    kinds: dict[str, str] = {}
    for here, held in filled:
        shapes = {n: None if isinstance(c, Strings) else c.shape[1:] for n, c in held.items()}
        own = {n: "text" if shape is None else f"shape {shape}" for n, shape in shapes.items()}
        kinds = kinds or own
        if own != kinds:
            raise InputError(f"{here}: has {own} where others have {kinds}: correct it")
    columns = {n: _join([held[n] for _, held in filled]) for n in kinds}
    sizes = [rows_of(next(iter(held.values()))) if held else 0 for _, held in clients.values()]
    notes = []
    if 0 in sizes:
        empty = list(clients)[sizes.index(0)]
        notes.append(f"clients without any example: {sizes.count(0)}, the first is {empty!r}")
    if isinstance(x := columns.get("x"), np.ndarray) and x.dtype.kind == "f" and x.ndim == 3:
        notes.append("pixels are not multiples of 1/255: kept as float32, in four times the space")
    owners = Owners(tuple(clients), np.cumsum([0, *sizes], dtype=np.int64))
    return Columns(columns, owners, tuple(notes))


def _join(parts: Sequence[Column]) -> Column:
    """Concatenate parts of a column; numbers of different types become float32, bytes fractions."""
    texts = [part for part in parts if isinstance(part, Strings)]
    if texts:
        lengths = np.concatenate([np.diff(part.offsets) for part in texts])
        text = np.concatenate([part.text for part in texts])
        return Strings(text, np.cumsum([0, *lengths], dtype=np.int64))
    arrays = [part for part in parts if not isinstance(part, Strings)]
    if len({array.dtype for array in arrays}) > 1:
        arrays = [a / np.float32(255) if a.dtype == np.uint8 else a for a in arrays]
        return np.concatenate(arrays, dtype=np.float32, casting="unsafe")
    return np.concatenate(arrays)


def as_bytes(fractions: Array) -> npt.NDArray[np.uint8] | None:
    """Convert values from 0 to 1 to 0 to 255; None if one is not a multiple of 1/255."""
    scaled = fractions * fractions.dtype.type(255)
    whole: Array = np.rint(scaled)
    return None if (np.abs(scaled - whole) > 1e-3).any() else whole.astype(np.uint8)
