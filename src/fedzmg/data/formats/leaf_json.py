"""Reader for LEAF's JSON, in one or more files ("shards") that hold different users.

::

    {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}

Other keys, like "hierarchies", are not used. Rows of ``x`` are flat lists of numbers, single
numbers, or strings. 784 numbers are an image of 28 by 28, and fractions that are multiples of
1/255 become bytes. Labels are whole numbers; a string as target, such as the next character of a
play, goes to the column ``next``. Clients come in the order of "users", shards in the order given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Column, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import REMEDY, Client, Paths
from fedzmg.errors import InputError


def read_leaf(paths: Paths) -> Columns:
    """Read shards of one data set; each shard is held in memory while it is read."""
    files = common.as_paths(paths)
    return common.collect(str(files[0]), _users(files))


def _users(paths: Sequence[Path]) -> Iterator[Client]:
    for path in paths:
        with common.reading(str(path), REMEDY):
            content = json.loads(path.read_bytes().decode("utf-8-sig"))
            names, counts, data = (content[key] for key in ("users", "num_samples", "user_data"))
            if len(names) != len(counts) or set(names) != set(data):
                sizes = f"{len(names)} users, {len(counts)} num_samples, {len(data)} user_data"
                raise InputError(f"{path}: has {sizes}, which do not match: {REMEDY}")
            names = common.as_strings(names, f"{path}: users")
        for name, count in zip(names, counts, strict=True):
            where = f"{path}: user {name!r}"
            with common.reading(where, "correct it"):
                # Popped, to free the shard while the columns grow.
                user = data.pop(name)
                x, y = user["x"], user["y"]
                lists = isinstance(x, list) and isinstance(y, list)
                if not lists or not len(x) == len(y) == count:
                    raise ValueError(f"x, y and num_samples {count} differ in length")
                columns = _columns(x, y, where) if x else {}
            yield Client(name, where, columns)


def _columns(x: list[Any], y: list[Any], where: str) -> dict[str, Column]:
    text, next_text = (set(map(type, values)) == {str} for values in (x, y))
    if text and next_text:
        return {"text": common.pack(x, f"{where}: x"), "next": common.pack(y, f"{where}: y")}
    labels, names = common.labels(y, where)
    if names:
        raise InputError(f"{where}: label {names[0]!r:.40}: expected a whole number from 0")
    inputs = common.pack(x, f"{where}: x") if text else _numbers(x, f"{where}: x")
    return {"text" if text else "x": inputs, "y": labels}


def _numbers(rows: list[Any], where: str) -> Array:
    """Convert rows of numbers: whole numbers stay whole, fractions become bytes if they can."""
    array = np.array(rows)
    if array.ndim > 2 or array.size == 0 or array.dtype.kind not in "if":
        raise InputError(
            f"{where}: has shape {array.shape} of {array.dtype}: give rows of numbers or text"
        )
    if array.ndim == 2 and array.shape[1] == 784:
        array = array.reshape(-1, 28, 28)
    if array.dtype.kind == "i":
        return array
    numbers = common.as_float32(array, where)
    small = common.as_bytes(array) if array.min() >= 0 and array.max() <= 1 else None
    return numbers if small is None else small
