"""Reader for Parquet and CSV files with a client column; needs PyArrow.

Numbers become ``x`` [n, features] float32, a single column of strings ``text``, a single column of
encoded images (bytes, or Hugging Face's struct of bytes and path) ``x`` uint8. Rows are counted
from 0, without the header of a CSV file.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Ids, Paths
from fedzmg.data.formats.image_folder import ImageForm, decode_all
from fedzmg.errors import InputError

_BLOCK = 2**24
_MOST_COLUMNS = 2**16


def read_table(
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
        features: the columns to learn from; all others by default. An empty list reads labels and
            clients only.
        classes: names of classes in the order of their ids; sorted by default.
        size: resize images to this height and width.
        grey: convert images to grey (True) or colour (False).
    """
    form = ImageForm(size, grey).check()
    files = common.as_paths(paths, "Parquet or CSV file")
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    tables = [_table(path, client, label, features) for path in files]
    chosen = tables[0][1]
    with common.reading(where, "make the columns of all files alike"):
        import pyarrow as pa

        parts = [part.select(tables[0][0].column_names) for part, _ in tables]
        table = pa.concat_tables(parts, promote_options="permissive")
    rows = table.num_rows
    if rows == 0:
        raise InputError(f"{where}: holds no row: give at least one")
    grouping = common.ungrouped(rows)
    if client is not None:
        grouping = common.by_client(_names(table, client, where), rows, where)
    values = _features(table, chosen, where)
    columns: dict[str, Column] = {}
    named: tuple[str, ...] = ()
    if label is not None:
        ids, named = common.labels(
            _names(table, label, where), f"{where}: column {label!r}", classes
        )
        columns["y"] = common.fill(allocate, "y", ids[grouping.order])
    if isinstance(values, np.ndarray):
        columns["x"] = common.fill(allocate, "x", values[grouping.order])
    elif values and isinstance(values[0], str):
        columns["text"] = common.pack([values[i] for i in grouping.order], where)
    elif values:
        stored = sum(common.file_size(path) for path in files)
        images = ((f"{where}: image in row {i}", image) for i, image in enumerate(values))
        columns["x"] = decode_all(images, rows, grouping.order, allocate, form, stored=stored)
    return Columns(columns, grouping.owners, common.classes_note(named), named)


def _table(
    path: Path, client: str | None, label: str | None, features: Sequence[str] | None
) -> tuple[Any, list[str]]:
    """Read the columns that are needed; return them with the names of the features."""
    stored = common.file_size(path)
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet
    except ImportError:
        raise InputError("tables need PyArrow: run pip install 'fedzmg[tables]'") from None
    where = str(path)
    with common.reading(where), path.open("rb") as file:
        start = file.read(4)
        if start[:2] in (b"\x1f\x8b", b"PK"):
            raise InputError(f"{where}: is compressed: unpack it first")
        packed = start == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")
        have = parquet.read_schema(path).names if packed else _csv_header(path)
        _check_columns(have, where)
        chosen = common.choose_features(have, client, label, features, where)
        needed = [name for name in dict.fromkeys((client, label, *chosen)) if name is not None]
        if packed:
            return _parquet(path, needed, stored), chosen
        table = arrow_csv.read_csv(
            where,
            # One thread, to name the row in a message.
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


def _parquet(path: Path, needed: list[str], stored: int) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    def decoded(batch: Any) -> Any:
        columns = [
            column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            for column in batch.columns
        ]
        return pa.RecordBatch.from_arrays(columns, batch.schema.names)

    with parquet.ParquetFile(path) as file:
        metadata = file.metadata
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        claimed = max(8 * metadata.num_rows * len(needed), sum(g.total_byte_size for g in groups))
        common.refuse_bomb(str(path), claimed, stored)
        # A long string is stored once however often it occurs: keep batches small.
        rows = max(1, min(4096, 2**26 // max(1, claimed)))
        batches, held = [], 0
        for batch in map(decoded, file.iter_batches(rows, columns=needed, use_threads=False)):
            held += batch.nbytes
            common.refuse_bomb(str(path), held, stored)
            batches.append(batch)
        empty = file.schema_arrow.empty_table().select(needed)
    return pa.Table.from_batches(batches) if batches else empty


def _csv_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader([file.readline(2**22)]), [])
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


def _column(table: Any, name: str, where: str) -> Any:
    """Return a column in one piece, with a value in every row."""
    column = table[name].combine_chunks()
    _refuse_null(column, f"{where}: column {name!r}")
    return column


def _refuse_null(column: Any, where: str, width: int = 1) -> None:
    if column.null_count:
        row = column.is_null().index(True).as_py() // width
        raise InputError(f"{where}: row {row} has no value: fill it in or remove the row")


def _names(table: Any, name: str, where: str) -> Ids | list[str]:
    """Return clients or labels."""
    column = _column(table, name, where)
    if _is_string(column.type):
        return list(column.to_pylist())
    where = f"{where}: column {name!r}"
    return common.numbers_or_strings(_numeric(column, where), f"{where}: values")


def _is_string(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _features(table: Any, chosen: Sequence[str], where: str) -> Array | list[Any]:
    import pyarrow as pa
    from pyarrow import compute

    if not chosen:
        return []
    columns = [_column(table, name, where) for name in chosen]
    if len(chosen) == 1:
        column = columns[0]
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            column = compute.struct_field(column, "bytes")
            _refuse_null(column, f"{where}: column {chosen[0]!r} (bytes of the image)")
        if _is_string(column.type) or pa.types.is_binary(column.type):
            return list(column.to_pylist())
        if pa.types.is_large_binary(column.type):
            return list(column.to_pylist())
    return np.concatenate(
        [
            _numbers(column, f"{where}: column {name!r}")
            for name, column in zip(chosen, columns, strict=True)
        ],
        axis=1,
    )


def _numbers(column: Any, where: str) -> Array:
    """Convert a column of numbers, or of lists of numbers, to [n, width]."""
    from pyarrow import compute, types

    rows, width, kind = len(column), 1, column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
        width = int(lengths[0])
        if (lengths != width).any() or width == 0:
            row = int(np.argmax(lengths != width))
            raise InputError(
                f"{where}: the list in row {row} has {lengths[row]} entries, the first has {width}"
            )
        column = compute.list_flatten(column)
        _refuse_null(column, where, width)
    if _is_string(column.type):
        raise InputError(
            f"{where}: holds text, as {column[0].as_py()[:40]!r}: choose other features"
        )
    return common.as_float32(_numeric(column, where).reshape(rows, width), where)


def _numeric(column: Any, where: str) -> Array:
    import pyarrow as pa

    types, kind = pa.types, column.type
    if types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InputError(f"{where}: has type {kind}: expected numbers")
    values: Array = column.to_numpy(zero_copy_only=False)
    return values
