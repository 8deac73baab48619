"""Reader for Parquet and CSV files with a client column; needs PyArrow.

Numbers become ``x`` [n, features] float32, a single column of strings ``text``, a single column of
encoded images (bytes, or Hugging Face's struct of bytes and path) ``x`` uint8. Rows are counted
from 0, without the header of a CSV file.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Features, Paths
from fedzmg.data.formats.image_folder import decode_all
from fedzmg.errors import InputError

_BLOCK = 2**24
_MOST_COLUMNS = 2**16
_STRINGS = {"string", "large_string", "string_view", "binary", "large_binary"}


def read_table(
    paths: Paths,
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
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with labels, whole numbers or names of classes; None for no labels.
        features: the columns to learn from; all others by default. An empty list reads labels and
            clients only.
        classes: names of classes in the order of their ids; sorted by default.
        size: resize images to this height and width.
        grey: convert images to grey (True) or colour (False).
    """
    files = common.as_paths(paths)
    where = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    try:
        import pyarrow as pa
    except ImportError:
        raise InputError("tables need PyArrow: run pip install 'fedzmg[tables]'") from None
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
            columns[name] = _values(table[name])
    chosen = {name: columns[name] for name in features or ()}
    [first, *_] = [*chosen.values(), None]
    inputs: Features = first
    if isinstance(first, list) and isinstance(first[0], bytes) and len(chosen) == 1:
        stored = sum(path.stat().st_size for path in files)
        images = ((f"{where}: image in row {i}", image) for i, image in enumerate(first))
        inputs = partial(decode_all, images, size=size, grey=grey, stored=stored)
    elif len(chosen) > 1 or isinstance(first, np.ndarray):
        inputs = common.side_by_side(chosen, where)
    grouping = common.by_client(columns.get(client), table.num_rows, where)
    y = columns.get(label)
    return common.assemble(where, grouping, inputs, y, classes=classes)


def _table(
    path: Path, client: str | None, label: str | None, features: Sequence[str] | None
) -> tuple[Any, list[str]]:
    """Read the columns that are needed; return them with the names of the features."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    with path.open("rb") as file:
        start = file.read(4)
    if start[:2] in (b"\x1f\x8b", b"PK"):
        raise InputError(f"{path}: is compressed: unpack it first")
    packed = start == b"PAR1" or path.suffix.lower() in (".parquet", ".pq")
    have = parquet.read_schema(path).names if packed else _csv_header(path)
    if len(have) > _MOST_COLUMNS or len(set(have)) < len(have) or not "".join(have).isprintable():
        raise InputError(
            f"{path}: {len(have)} columns: use at most {_MOST_COLUMNS}, with different names of "
            "plain text"
        )
    chosen = common.choose_features(have, client, label, features, str(path))
    needed = [name for name in (client, label, *chosen) if name is not None]
    if packed:
        return _parquet(path, needed), chosen
    table = arrow_csv.read_csv(
        str(path),
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
            raise InputError(f"{path}: column {name!r} is not UTF-8: save the file as UTF-8")
    return table, chosen


def _parquet(path: Path, needed: list[str]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    stored = path.stat().st_size
    with parquet.ParquetFile(path) as file:
        metadata = file.metadata
        groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
        claimed = max(8 * metadata.num_rows * len(needed), sum(g.total_byte_size for g in groups))
        common.refuse_bomb(str(path), claimed, stored)
        # A long string is stored once however often it occurs: keep batches small.
        rows = max(1, min(4096, 2**26 // max(1, claimed)))
        fields = [file.schema_arrow.field(name) for name in needed]
        types = [f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in fields]
        schema = pa.schema(list(zip(needed, types, strict=True)))
        parts, held = [schema.empty_table()], 0
        for batch in file.iter_batches(rows, columns=needed, use_threads=False):
            parts.append(pa.Table.from_batches([batch]).select(needed).cast(schema))
            held += parts[-1].nbytes
            common.refuse_bomb(str(path), held, stored)
    return pa.concat_tables(parts)


def _csv_header(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = next(csv.reader([file.readline(2**22)]), [])
    if not header:
        raise InputError(f"{path}: is empty: expected a line with the names of columns")
    return header


def _values(column: Any) -> Array | list[Any]:
    """Convert a column to numbers, [n] or [n, width], or to a list of strings or bytes."""
    import pyarrow as pa
    from pyarrow import compute

    column = column.combine_chunks()
    rows = len(column)
    shape: tuple[int, ...] = (rows,)
    if pa.types.is_struct(column.type):  # an image of Hugging Face
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
