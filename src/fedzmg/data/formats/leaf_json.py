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
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, Owners, Strings, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Paths
from fedzmg.errors import InputError

_LARGEST = float(np.finfo(np.float32).max)


class _User(NamedTuple):
    """Columns of a user, empty for one without examples."""

    where: str
    columns: dict[str, Column]
    rows: int


def read_leaf(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read shards of one data set; each shard is held in memory while it is read."""
    files = common.as_paths(paths, "JSON file")
    users = _users(files, packed=True)
    types = {x.dtype for u in users.values() if isinstance(x := u.columns.get("x"), np.ndarray)}
    if np.dtype(np.uint8) in types and len(types) > 1:
        # Only some users' fractions are bytes; read the rounded ones again as they are.
        users = _users(files, packed=False)
    filled = [user for user in users.values() if user.rows]
    if not filled:
        raise InputError(f"{files[0]}: no user has an example: get the file again")
    columns = {
        name: _join(name, [user.columns[name] for user in filled], allocate)
        for name in filled[0].columns
    }
    notes = []
    empty = [name for name, user in users.items() if not user.rows]
    if empty:
        notes.append(f"clients without any example: {len(empty)}, the first is {empty[0]!r}")
    x = columns.get("x")
    if isinstance(x, np.ndarray) and x.dtype == np.float32 and x.shape[1:] == (28, 28):
        notes.append(f"images: {common.NOT_BYTES}")
    offsets = np.cumsum([0, *(user.rows for user in users.values())], dtype=np.int64)
    return Columns(columns, Owners(tuple(users), offsets), tuple(notes))


def _users(paths: Sequence[Path], *, packed: bool) -> dict[str, _User]:
    """Read every user of all shards and compare it with the first one."""
    users: dict[str, _User] = {}
    origin: dict[str, Path] = {}
    first: _User | None = None
    for path in paths:
        for name, user in _shard(path, packed=packed):
            if name in users:
                raise InputError(
                    f"user {name!r} occurs in {origin[name]} and in {path}: rename one"
                )
            users[name], origin[name] = user, path
            if user.rows:
                first = first or user
                if _kind(user) != _kind(first):
                    raise InputError(
                        f"{user.where}: has {_kind(user)} where {first.where} has {_kind(first)}"
                    )
    return users


def _kind(user: _User) -> dict[str, Any]:
    return {
        name: "text" if isinstance(column, Strings) else f"numbers of shape {column.shape[1:]}"
        for name, column in user.columns.items()
    }


def _shard(path: Path, *, packed: bool) -> Iterator[tuple[str, _User]]:
    common.file_size(path)
    with common.reading(str(path), common.REMEDY):
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    names, counts, data = (
        _entry(content, key, kind, str(path))
        for key, kind in (("users", list), ("num_samples", list), ("user_data", dict))
    )
    if len(names) != len(counts):
        raise InputError(
            f"{path}: has {len(names)} users but {len(counts)} num_samples: expected one for each"
        )
    seen: set[str] = set()
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        if not isinstance(name, str) or name.encode(errors="ignore").decode() != name:
            raise InputError(f"{path}: user number {number} has a name that is not text: rename it")
        if name in seen:
            raise InputError(f"{path}: user {name!r} is listed twice: list each user once")
        seen.add(name)
        if name not in data:
            raise InputError(f"{path}: user {name!r} has no user_data: {common.REMEDY}")
        # Popped, to free the shard while the columns grow.
        yield name, _user(data.pop(name), count, f"{path}: user {name!r}", packed=packed)
    if data:
        raise InputError(f"{path}: user_data of {next(iter(data))!r}, who is not in users: add it")


def _entry(content: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise InputError(f"{where}: has no {key!r}: {common.REMEDY}")
    if not isinstance(content[key], kind):
        found = type(content[key]).__name__
        raise InputError(f"{where}: {key!r} is a {found}: expected a {kind.__name__}")
    return content[key]


def _user(data: Any, count: Any, where: str, *, packed: bool) -> _User:
    x, y = (_entry(data, key, list, where) for key in ("x", "y"))
    if len(x) != len(y) or type(count) is not int or count != len(x):
        raise InputError(
            f"{where}: has {len(x)} of 'x', {len(y)} of 'y' and num_samples {count!r}: correct them"
        )
    if not x:
        return _User(where, {}, 0)
    columns: dict[str, Column] = {}
    if _all_text(x):
        columns["text"] = common.pack(x, f"{where}: x")
    else:
        columns["x"] = _inputs(x, where, packed=packed)
    if "text" in columns and _all_text(y):
        columns["next"] = common.pack(y, f"{where}: y")
    else:
        columns["y"] = _labels(y, where)
    return _User(where, columns, len(x))


def _all_text(values: list[Any]) -> bool:
    return set(map(type, values)) == {str}


def _inputs(values: list[Any], where: str, *, packed: bool) -> Array:
    """Convert rows of numbers: whole numbers stay whole, fractions become bytes if they can."""
    single = not isinstance(values[0], list)
    rows = [[value] for value in values] if single else values
    kinds: set[type] = set()
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(rows[0]) or not row:
            raise InputError(f"{where}: row {i} of 'x': expected rows of equal length, at least 1")
        kinds.update(map(type, row))
        if not kinds <= {int, float}:
            found = next(iter(kinds - {int, float})).__name__
            raise InputError(f"{where}: row {i} of 'x' holds a {found}: expected numbers or text")
    try:
        array = np.array(rows, np.float64 if float in kinds else np.int64)
    except OverflowError:
        raise InputError(
            f"{where}: holds a whole number beyond 64 bits: use smaller ones"
        ) from None
    if single:
        array = array[:, 0]
    elif array.shape[1] == 784:
        array = array.reshape(-1, 28, 28)
    if array.dtype == np.int64:
        return array
    # NaN fails every comparison.
    bad = ~(np.abs(array) <= _LARGEST).reshape(len(rows), -1).all(axis=1)
    if bad.any():
        raise InputError(
            f"{where}: row {int(np.argmax(bad))} of 'x' holds NaN, infinity or a number beyond "
            "float32: remove it"
        )
    fractions = packed and array.min() >= 0 and array.max() <= 1
    small = common.as_bytes(array) if fractions else None
    return array.astype(np.float32) if small is None else small


def _labels(values: list[Any], where: str) -> Array:
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not 0 <= value < 2**63 or value != int(value):
            shown = value if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise InputError(
                f"{where}: label {i} is {str(shown)[:40]}: expected a whole number from 0"
            )
    return np.array([int(value) for value in values], np.int64)


def _join(name: str, parts: list[Column], allocate: Allocate) -> Column:
    """Concatenate all users' parts of a column."""
    if isinstance(parts[0], Strings):
        texts = [part for part in parts if isinstance(part, Strings)]
        offsets = allocate(f"{name}.offsets", (sum(t.rows for t in texts) + 1,), np.int64)
        offsets[0] = 0
        offsets[1:] = np.cumsum(np.concatenate([np.diff(t.offsets) for t in texts]))
        text = allocate(f"{name}.text", (int(offsets[-1]),), np.uint8)
        np.concatenate([t.text for t in texts], out=text)
        return Strings(text, offsets)
    arrays = [part for part in parts if not isinstance(part, Strings)]
    types = {array.dtype for array in arrays}
    dtype = types.pop() if len(types) == 1 else np.dtype(np.float32)
    rows = sum(len(array) for array in arrays)
    column = allocate(name, (rows, *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=column, casting="unsafe")
    return column
