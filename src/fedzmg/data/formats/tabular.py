"""Readers for tables: Parquet and CSV files (they need PyArrow), and dataset objects.

Numbers become ``x`` [n, features] float32, a single column of strings ``text``, a single column of
encoded images (bytes, or Hugging Face's struct of bytes and path) ``x`` uint8. Rows are counted
from 0, without the header of a CSV file.

Dataset objects are those of Hugging Face, and the partitions flwr-datasets makes of them. Neither
package is imported: an object counts as a dataset if it has ``column_names``, a length, and gives a
column for ``dataset[name]``.
"""

import contextlib
import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedzmg.data.columns import Array, Columns, group
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Entries, Features, Names, Paths, Size
from fedzmg.data.formats.image_folder import decode_all
from fedzmg.errors import InputError, unknown

with contextlib.suppress(ImportError):  # optional; dataset objects do not need it
    import pyarrow as pa
    from pyarrow import compute, parquet
    from pyarrow import csv as arrow_csv

Parts: TypeAlias = Mapping[str, Any] | Sequence[Any]
_BLOCK = 2**24
_MOST_COLUMNS = 2**16
_STRINGS = {"string", "large_string", "string_view", "binary", "large_binary"}
_ROW = "look at that row of the dataset"


def read_table(
    paths: Paths, *, client: str | None = "client", label: str | None = "label",
    features: Names = None, classes: Names = None, size: Size = None, grey: bool | None = None,
) -> Columns:  # fmt: skip
    """Read one table from one or more files with the same columns.

    Args:
        paths: a Parquet or CSV file, or several.
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with whole numbers, names of classes or other numbers; None for none.
        features: the columns to learn from; all others by default. Several must hold numbers, one
            may hold images, arrays or text. An empty list reads labels and clients only.
        classes: names of classes in the order of their ids; sorted by default.
        size: resize images to this height and width.
        grey: convert images to grey (True) or colour (False).
    """
    files = common.as_paths(paths)
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    if "pa" not in globals():
        raise InputError("tables need PyArrow: run pip install 'fedzmg[tables]'")
    tables: list[Any] = []
    for path in files:
        with common.reading(str(path)):
            table, features = _table(path, client, label, features)
        tables.append(table.select(tables[0].column_names) if tables else table)
    with common.reading(where, "make the columns of all files alike"):
        table = pa.concat_tables(tables, promote_options="permissive")
    if table.num_rows == 0:
        raise InputError(f"{where}: holds no row: give at least one")
    columns = {}
    for name in table.column_names:
        with common.reading(f"{where}: column {name!r}", "fill it in or leave it out"):
            columns[name] = _arrow_values(table[name])

    def entries(name: str) -> Entries:
        for row, value in enumerate(columns[name]):
            yield f"{where}: column {name!r}, row {row}", value

    stored = sum(path.stat().st_size for path in files)
    decode = partial(decode_all, size=size, grey=grey, stored=stored)
    inputs = _inputs(where, features or (), columns.__getitem__, entries, decode)
    grouping = common.by_client(columns.get(client), table.num_rows, where)
    return common.assemble(where, grouping, inputs, columns.get(label), classes=classes, real=True)


def _table(path: Path, client: Any, label: Any, features: Names) -> tuple[Any, list[str]]:
    """Read the columns that are needed; return them with the names of the features."""
    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] in (b"\x1f\x8b", b"PK"):
        raise InputError(f"{path}: is compressed: unpack it first")
    packed = start == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")
    have: list[str] = parquet.read_schema(path).names if packed else []
    if not packed:  # before PyArrow makes a builder for each of too many columns
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
            have = next(csv.reader([text.readline(2**22)]), [])
    few = 0 < len(set(have)) == len(have) <= _MOST_COLUMNS
    if not few or not "".join(have).isprintable():
        remedy = f"use 1 to {_MOST_COLUMNS}, with different names of plain text in the first line"
        raise InputError(f"{path}: {len(have)} columns: {remedy}")
    chosen = _choose_features(have, (client, label), features, str(path))
    needed = [name for name in (client, label, *chosen) if name is not None]
    if packed:
        return _parquet(path, needed), chosen
    # A client called 007 is not client 7.
    types = {} if client is None else {client: pa.string()}
    options = arrow_csv.ConvertOptions(include_columns=needed, column_types=types)
    # One thread, to name the row in a message.
    reading = arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK)
    parsing = arrow_csv.ParseOptions(newlines_in_values=True)
    table = arrow_csv.read_csv(path, reading, parsing, options)
    for name in table.column_names:
        if pa.types.is_binary(table[name].type):
            raise InputError(f"{path}: column {name!r} is not UTF-8: save the file as UTF-8")
    return table, chosen


def _parquet(path: Path, needed: list[str]) -> Any:
    stored = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        metadata = file.metadata
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        claimed = max(8 * metadata.num_rows * len(needed), sum(g.total_byte_size for g in groups))
        common.refuse_bomb(str(path), claimed, stored)
        table = file.read(needed, use_threads=False).select(needed)
    types = [t.value_type if pa.types.is_dictionary(t) else t for t in table.schema.types]
    table = table.cast(pa.schema(list(zip(needed, types, strict=True))))
    # A long string is stored once however often it occurs.
    common.refuse_bomb(str(path), table.nbytes, stored)
    return table


def _arrow_values(column: Any) -> Array | list[Any]:
    """Convert a column to numbers, [n] or [n, width], or to a list of strings or bytes."""
    column = column.combine_chunks()
    rows = len(column)
    shape: tuple[int, ...] = (rows,)
    if pa.types.is_struct(column.type):  # an image of Hugging Face
        if column.type.get_field_index("bytes") < 0:
            raise ValueError(f"is a {column.type!s:.60}; store its fields as columns")
        column = compute.struct_field(column, "bytes")
    if hasattr(column.type, "value_type"):
        lengths = set(compute.list_value_length(column).to_pylist())
        if len(lengths) > 1 or not all(lengths):
            raise ValueError(f"its lists have lengths {list(lengths)[:8]}, expected one length")
        shape = (rows, *lengths)
        column = compute.list_flatten(column)
    if column.null_count:
        row = column.is_null().index(True).as_py() * rows // len(column)
        raise ValueError(f"row {row} has no value")
    if str(column.type) in _STRINGS:
        if len(shape) > 1:
            raise ValueError("holds lists of text, expected one text a row")
        return list(column.to_pylist())
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values: Array = column.to_numpy(zero_copy_only=False).reshape(shape)
    return values


def from_dataset(dataset: Any, *, client: str | None, label: str | None, **options: Any) -> Columns:
    """Make columns of one dataset with a client column.

    ``dataset`` is a ``datasets.Dataset``, or an object that behaves like one. Options are those of
    :func:`read_table`; ``classes`` are by default the dataset's own.
    """
    return _columns({"dataset": dataset}, None, client, label, **options)


def from_partitions(partitions: Parts, *, label: str | None, **options: Any) -> Columns:
    """Make columns of one dataset for each client, in the order given.

    ``partitions`` are datasets by name of client; those of a sequence are called 0, 1, 2, ...
    Options are those of :func:`from_dataset`.
    """
    named = partitions if isinstance(partitions, Mapping) else dict(enumerate(partitions))
    parts = {f"client {str(name)!r}": dataset for name, dataset in named.items()}
    return _columns(parts, [*map(str, named)], None, label, **options)


def _values(parts: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = []
    for where, dataset in parts.items():
        with common.reading(f"{where}: column {name!r}", _ROW):
            values += list(dataset[name][:])
    return values


def _feature(dataset: Any, name: str, attribute: str) -> Any:
    """Return an attribute of a column's declared type, where there is one."""
    features = getattr(dataset, "features", None)
    feature: Any = features.get(name) if isinstance(features, Mapping) else None
    while hasattr(feature, "feature"):  # of lists
        feature = feature.feature
    return getattr(feature, attribute, None)


def _columns(
    parts: Mapping[str, Any], names: Names, client: str | None, label: str | None,
    features: Names = None, classes: Names = None, size: Size = None, grey: bool | None = None,
) -> Columns:  # fmt: skip
    """Join datasets by name in messages; ``names`` are their clients, if each is a client's."""
    if not parts:
        raise InputError("no partition is given: give one dataset for each client")
    for where, dataset in parts.items():
        have = getattr(dataset, "column_names", None)
        # Streams have columns, too, but no length; several splits have a mapping.
        known = all(hasattr(type(dataset), method) for method in ("__getitem__", "__len__"))
        if not isinstance(have, list | tuple) or not known or len(dataset) == 0:
            problem = f"a {type(dataset).__name__} is not a table with rows"
            raise InputError(f"{where}: {problem}: choose one split, and load a stream first")
        features = _choose_features(have, (client, label), features, where)
    [(where, first), *_] = parts.items()
    sizes = [len(dataset) for dataset in parts.values()]
    if names is None:
        clients = None if client is None else _values(parts, client)
        grouping = common.by_client(clients, sizes[0], where)
    else:
        grouping = group(np.repeat(np.arange(len(sizes)), sizes), names)
    y: list[Any] | None = None
    if label is not None:
        y = []
        for here, dataset in parts.items():
            values: Any = _values({here: dataset}, label)
            own = _feature(dataset, label, "names")
            if own is not None:
                # By name: other partitions, or the user, may number classes in another order.
                ids, _ = common.labels(values, f"{here}: column {label!r}", own)
                values, classes = [own[i] for i in ids], classes or own
            y += values
    chosen, read = features or (), partial(_values, parts)
    declared = _feature(first, chosen[0], "dtype") if chosen else None
    decode = partial(decode_all, size=size, grey=grey)
    inputs = _inputs(where, chosen, read, partial(_entries, parts), decode, declared)
    return common.assemble(where, grouping, inputs, y, classes=classes, real=True)


def _entries(parts: Mapping[str, Any], name: str) -> Entries:
    for part, dataset in parts.items():
        with common.reading(f"{part}: column {name!r}", _ROW):
            column = iter(dataset[name])
        for row in range(len(dataset)):
            where = f"{part}: column {name!r}, row {row}"
            with common.reading(where, _ROW):
                entry = next(column)
            yield where, entry


def _inputs(
    where: str, chosen: Sequence[str], values: Callable[[str], Any],
    entries: Callable[[str], Entries], decode: Callable[..., Array], declared: Any = None,
) -> Features:  # fmt: skip
    """Return text, a decoder of images, stacked arrays, or numbers side by side."""
    if len(chosen) == 1:
        first = next(entries(chosen[0]))[1]
        if isinstance(first, str):
            return list(values(chosen[0]))
        encoded = isinstance(first, bytes) or (isinstance(first, Mapping) and "bytes" in first)
        if encoded or (hasattr(first, "mode") and hasattr(first, "convert")):  # of Pillow
            return partial(decode, entries(chosen[0]))
        if np.ndim(first) > 1:
            return _stack(f"{where}: column {chosen[0]!r}", entries(chosen[0]), declared)
    parts = []
    for name in chosen:
        here = f"{where}: column {name!r}"
        with common.reading(here, "give numbers, or lists of equally many numbers"):
            column = values(name)
            if isinstance(column, list) and isinstance(column[0], str | bytes):
                raise ValueError(f"it holds {column[0]!r:.40}")
            array = np.asarray(column)
            common.check_numbers(array, here)
            parts.append(common.as_float32(array.reshape(len(array), -1), here))
    return np.concatenate(parts, axis=1) if parts else None


def _choose_features(have: Sequence[str], named: Any, features: Names, where: str) -> list[str]:
    """Return the columns to learn from; ``named`` are those of clients and labels, if any."""
    special = [name for name in named if name is not None]
    for name in (*special, *(features or ())):
        if name not in have:
            raise InputError(f"{where}: {unknown('column', str(name), have)}")
    chosen = [n for n in have if n not in special] if features is None else list(features)
    used = [*special, *chosen]
    if len(set(used)) < len(used) or (not chosen and features is None):
        raise InputError(f"{where}: columns used are {used!r:.200}: name other features, once each")
    return chosen


def _stack(where: str, entries: Entries, declared: Any) -> Array:
    """Stack arrays of one shape, colours first; lists of lists have lost their declared type."""
    with contextlib.suppress(TypeError):
        declared = np.dtype(declared or "O")
    with common.reading(where, "make all arrays alike"):
        dtype = declared if getattr(declared, "kind", "O") in "biuf" else None
        array = np.stack([np.asarray(entry, dtype=dtype) for _, entry in entries])
    common.check_numbers(array, where)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] == 3:
        return array
    if 1 in (array.shape[1], array.shape[3]):
        return array.squeeze(1 if array.shape[1] == 1 else 3)
    return array.transpose(0, 3, 1, 2) if array.shape[3] == 3 else array
