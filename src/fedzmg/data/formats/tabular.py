"""Parquet and CSV files with a column that says whose row it is; they need PyArrow.

Numbers become ``x`` [n, features] float32, a single column of strings ``text``, a single column of
packed images (bytes, or Hugging Face's struct of bytes and path) ``x`` uint8. Rows are counted
from 0, without the header of a CSV file.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Allocate, Array, Column, Columns, in_memory
from fedzmg.data.formats.image_folder import check_wanted, decode_all
from fedzmg.data.formats.rows import (
    Ids,
    Paths,
    as_paths,
    by_client,
    classes_note,
    file_size,
    labels,
    numbers_or_strings,
    pack,
    reading,
    refuse_bomb,
    ungrouped,
    unpacked_bound,
)
from fedzmg.errors import InputError, unknown

_BATCH = 4096
_BLOCK = 2**24
_MOST_COLUMNS = 2**16
_LONGEST_HEADER = 2**22

Names: TypeAlias = Ids | list[str]
Features: TypeAlias = npt.NDArray[np.float32] | list[str] | list[bytes]


class _Named(NamedTuple):
    """A column of PyArrow and its name in messages."""

    where: str
    values: Any


class _Part(NamedTuple):
    """The rows of one file."""

    where: str
    rows: int
    stored: int
    client: Names | None
    label: Names | None
    x: Features


def read(
    paths: Paths,
    allocate: Allocate = in_memory,
    *,
    client: str | None = "client",
    label: str | None = "label",
    features: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
) -> Columns:
    """Read one table from one or more files with the same columns.

    Args:
        paths: a Parquet or CSV file, or several.
        allocate: makes the columns ``x`` and ``y``.
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with labels, whole numbers or names of classes; None for no labels.
        features: the columns to learn from; all others without it.
        classes: names of classes in the order of their ids; sorted without it.
        size: resize images to this height and width.
        grey: turn images into grey (True) or colour (False).

    Raises:
        InputError: for missing columns, missing values, values of another type, damaged files.
    """
    wanted = check_wanted(size, grey)
    files = as_paths(paths)
    if not files:
        raise InputError("no file is given: give a Parquet or CSV file")
    parts = [_part(path, client, label, features) for path in files]
    where = parts[0].where if len(parts) == 1 else f"{parts[0].where} and {len(parts) - 1} more"
    for part in parts[1:]:
        _refuse_other_kind(parts[0], part)
    rows = sum(part.rows for part in parts)
    owners = [part.client for part in parts if part.client is not None]
    grouping = by_client(joined(owners), rows, where) if owners else ungrouped(rows)
    columns: dict[str, Column] = {}
    names: tuple[str, ...] = ()
    named = [part.label for part in parts if part.label is not None]
    if named:
        ids, names = labels(joined(named), f"{where}: column {label!r}", classes)
        y = allocate("y", (rows,), np.int64)
        y[:] = ids[grouping.order]
        columns["y"] = y
    place = grouping.place
    first = parts[0].x
    if isinstance(first, np.ndarray):
        x = allocate("x", (rows, first.shape[1]), np.float32)
        begin = 0
        for part in parts:
            x[place[begin : begin + part.rows]] = part.x
            begin += part.rows
        columns["x"] = x
    elif isinstance(first[0], str):
        texts = [text for part in parts for text in part.x]
        columns["text"] = pack([texts[i] for i in grouping.order], where)
    else:
        stored = sum(part.stored for part in parts)
        columns["x"] = decode_all(_images(parts), rows, place, allocate, wanted, stored=stored)
    return Columns(columns, grouping.owners, classes_note(names), names)


def read_labels(paths: Paths, *, client: str | None = "client", label: str = "label") -> Columns:
    """Read labels and clients of a table and nothing else, whatever its other columns hold.

    Args:
        paths: a Parquet or CSV file, or several.
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with labels, whole numbers or names of classes.

    Raises:
        InputError: as :func:`read`.
    """
    held = read(paths, client=client, label=None, features=[label])
    where = f"{as_paths(paths)[0]}: column {label!r}"
    values: Any
    if "text" in held.columns:
        text, ends = held.strings("text")
        values = [bytes(text[a:b]).decode() for a, b in pairwise(ends.tolist())]
    else:
        values = held.array("x")[:, 0]
    ids, names = labels(values, where)
    return Columns({"y": ids}, held.owners, classes_note(names), names)


def _images(parts: Sequence[_Part]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        for row, image in enumerate(part.x):
            yield f"{part.where}: image in row {row}", image


def _kind(part: _Part) -> tuple[str, ...]:
    x = part.x
    kind = f"{x.shape[1]} numbers" if isinstance(x, np.ndarray) else type(x[0]).__name__
    return (
        f"features of {kind}",
        f"labels of {'strings' if isinstance(part.label, list) else 'numbers'}",
        f"clients of {'strings' if isinstance(part.client, list) else 'numbers'}",
    )


def _refuse_other_kind(first: _Part, other: _Part) -> None:
    for have, expected in zip(_kind(other), _kind(first), strict=True):
        if have != expected:
            raise InputError(
                f"{other.where} has {have} but {first.where} has {expected}: make their columns "
                "alike"
            )


def joined(values: Sequence[Names]) -> Names:
    """Values of several files or datasets, all of one kind, one after another."""
    if isinstance(values[0], list):
        return [value for part in values if isinstance(part, list) for value in part]
    return np.concatenate([part for part in values if isinstance(part, np.ndarray)])


def _part(
    path: Path, client: str | None, label: str | None, features: Sequence[str] | None
) -> _Part:
    stored = file_size(path)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise InputError("tables need PyArrow: run pip install 'fedzmg[tables]'") from None
    where = str(path)
    with reading(where):
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"PAR1":
            table, chosen = _parquet(path, stored, client, label, features)
        elif start[:2] in (b"\x1f\x8b", b"PK"):
            raise InputError(f"{where}: is packed: unpack it first")
        elif path.suffix.lower() in (".parquet", ".pq"):
            raise InputError(f"{where}: is no Parquet file: get the file again")
        else:
            table, chosen = _csv(path, client, label, features)
        if table.num_rows == 0:
            raise InputError(f"{where}: holds no row: give at least one")
        columns = {
            name: _Named(f"{where}: column {name!r}", column)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
        return _Part(
            where,
            table.num_rows,
            stored,
            None if client is None else _names(columns[client]),
            None if label is None else _names(columns[label]),
            _features([columns[name] for name in chosen]),
        )


def choose(
    have: Sequence[str],
    client: str | None,
    label: str | None,
    features: Sequence[str] | None,
    where: str,
) -> list[str]:
    """Names of the columns to learn from.

    Raises:
        InputError: for a name that is not there, or none that is left.
    """
    special = [name for name in (client, label) if name is not None]
    present = set(have)
    for name in (*special, *(features or ())):
        if name not in present:
            raise InputError(f"{where}: {unknown('column', str(name), have)}")
    chosen = [n for n in have if n not in special] if features is None else list(features)
    twice = next((n for n, uses in Counter([*special, *chosen]).items() if uses > 1), None)
    if twice is not None:
        raise InputError(f"{where}: column {twice!r} is used twice: use it once")
    if not chosen:
        raise InputError(f"{where}: no column is left to learn from: name some in features")
    return chosen


def _parquet(
    path: Path, stored: int, client: str | None, label: str | None, features: Sequence[str] | None
) -> tuple[Any, list[str]]:
    import pyarrow as pa
    from pyarrow import parquet

    where = str(path)
    with parquet.ParquetFile(path) as file:
        have = file.schema_arrow.names
        _check_columns(have, where)
        chosen = choose(have, client, label, features, where)
        needed = [name for name in dict.fromkeys((client, label, *chosen)) if name is not None]
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        claimed = sum(max(0, part.total_byte_size) for part in groups)
        refuse_bomb(where, max(claimed, 8 * file.metadata.num_rows * len(needed)), stored)
        # A long string is stored once however often it occurs: no batch may outgrow the bound.
        most = max(1, min(_BATCH, unpacked_bound(stored) // max(1, claimed)))
        batches, held = [], 0
        for coded in file.iter_batches(most, columns=needed, use_threads=False):
            batch = _decoded(coded)
            held += batch.nbytes
            refuse_bomb(where, held, stored)
            batches.append(batch)
        schema = batches[0].schema if batches else file.schema_arrow
        return pa.Table.from_batches(batches, schema), chosen


def _decoded(batch: Any) -> Any:
    """A batch whose columns hold values instead of codes for values."""
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _csv(
    path: Path, client: str | None, label: str | None, features: Sequence[str] | None
) -> tuple[Any, list[str]]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    where = str(path)
    have = _csv_header(path)
    _check_columns(have, where)
    chosen = choose(have, client, label, features, where)
    needed = [name for name in dict.fromkeys((client, label, *chosen)) if name is not None]
    with pa.OSFile(where) as file:
        table = arrow_csv.read_csv(
            file,
            # One thread, so that a message can say the row.
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=arrow_csv.ParseOptions(newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=needed,
                # A client called 007 is not client 7.
                column_types={} if client is None else {client: pa.string()},
            ),
        )
    for name in table.column_names:
        if pa.types.is_binary(table[name].type):
            raise InputError(f"{where}: column {name!r} is not UTF-8: save the file as UTF-8")
    return table, chosen


def _csv_header(path: Path) -> list[str]:
    with path.open("rb") as file:
        start = file.read(_LONGEST_HEADER)
    lines = start.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    header = next(csv.reader(lines), [])
    if not header:
        raise InputError(f"{path}: is empty: expected a line with the names of columns")
    return header


def _check_columns(have: Sequence[str], where: str) -> None:
    if len(have) > _MOST_COLUMNS:
        raise InputError(f"{where}: has {len(have)} columns: use at most {_MOST_COLUMNS}")
    odd = next((name for name in have if not name.isprintable()), None)
    if odd is not None:
        raise InputError(f"{where}: the column name {odd[:40]!r} is not plain text: rename it")
    if len(set(have)) != len(have):
        twice = next(name for i, name in enumerate(have) if name in have[:i])
        raise InputError(f"{where}: column {twice!r} occurs twice: give each its own name")


def _plain(named: _Named) -> Any:
    """A column in one piece, with a value in every row."""
    _refuse_null(named.values, named.where)
    return named.values.combine_chunks()


def _refuse_null(column: Any, where: str, width: int = 1) -> None:
    from pyarrow import compute

    if column.null_count:
        row = compute.index(compute.is_null(column), True).as_py() // width
        raise InputError(f"{where}: row {row} has no value: fill it in or remove the row")


def _names(named: _Named) -> Names:
    """Clients or labels."""
    import pyarrow as pa

    where, column = named.where, _plain(named)
    kind = column.type
    if _is_string(kind):
        return list(column.to_pylist())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InputError(f"{where}: has type {kind}: expected whole numbers or strings")
    return numbers_or_strings(column.to_numpy(zero_copy_only=False), f"{where}: values")


def _is_string(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _features(chosen: Sequence[_Named]) -> Features:
    import pyarrow as pa
    from pyarrow import compute

    if len(chosen) == 1:
        where, column = chosen[0].where, _plain(chosen[0])
        kind = column.type
        if _is_string(kind):
            return list(column.to_pylist())
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            column = compute.struct_field(column, "bytes")
            _refuse_null(column, f"{where} (bytes of the image)")
            kind = column.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return list(column.to_pylist())
    return np.concatenate([_numbers(named) for named in chosen], axis=1)


def _numbers(named: _Named) -> npt.NDArray[np.float32]:
    """A column of numbers, or of lists of numbers, as [n, width]."""
    import pyarrow as pa
    from pyarrow import compute

    where, column = named.where, _plain(named)
    rows, width, kind = len(column), 1, column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
        width = int(lengths[0])
        if (lengths != width).any() or width == 0:
            row = int(np.argmax(lengths != width))
            raise InputError(
                f"{where}: the list in row {row} has {lengths[row]} entries, the first has "
                f"{width}: make them equally long"
            )
        column = compute.list_flatten(column)
        _refuse_null(column, where, width)
        kind = column.type
    if _is_string(kind):
        _refuse_text(column, where)
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise InputError(
            f"{where}: has type {kind}: expected numbers; name the columns to use in features"
        )
    return as_float32(column.to_numpy(zero_copy_only=False).reshape(rows, width), where)


def _refuse_text(column: Any, where: str) -> None:
    for row, text in enumerate(column.to_pylist()):
        try:
            float(text)
        except ValueError:
            raise InputError(
                f"{where}: row {row} holds {text[:40]!r}, not a number: name the columns to use in "
                "features; text must be the only one"
            ) from None
    raise InputError(f"{where}: holds numbers written as strings: store them as numbers")


def as_float32(values: Array, where: str) -> npt.NDArray[np.float32]:
    """Numbers [n, ...] as float32.

    Raises:
        InputError: for a value that is not finite, or not with 32 bits.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values.astype(np.float32)
    bad = ~np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(
            f"{where}: row {row} holds NaN, infinity, or a number beyond 32 bits: remove it or "
            "fill it in"
        )
    return numbers
