"""LEAF's JSON, in one or more files ("shards") that hold different users.

::

    {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}

Other keys, like "hierarchies", are not used. Rows of ``x`` are flat lists of numbers, single
numbers, or strings. 784 numbers are an image of 28 by 28, and fractions that are multiples of
1/255 become bytes. Labels are whole numbers; where the target is a string, as the next character
of a play is, it goes to the column ``next``. Clients come in the order of "users", shards in the
order given; rows are counted from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Allocate, Array, Column, Columns, Owners, Strings, in_memory
from fedzmg.data.formats.pixels import NOT_BYTES, as_bytes
from fedzmg.data.formats.rows import Paths, as_paths, file_size, pack, reading
from fedzmg.errors import InputError

_REMEDY = "is it complete? get the file again"
_IMAGE = {784: (28, 28)}
_LARGEST = float(np.finfo(np.float32).max)


class _User(NamedTuple):
    """The columns of a user, empty for one without examples, and how messages name it."""

    where: str
    columns: dict[str, Column]
    rows: int


def read(paths: Paths, allocate: Allocate = in_memory) -> Columns:
    """Read shards of one data set.

    A shard is held in memory while it is read, as JSON must be; what is kept of it is small.

    Raises:
        InputError: for what is not JSON in this layout, a user that occurs twice or is not counted
            right, rows of different length, numbers that are not finite, or no example at all.
    """
    files = as_paths(paths)
    if not files:
        raise InputError("no JSON file given: name at least one")
    users = _users(files, packed=True)
    if _is_mixed(users):
        # Only some users' fractions are bytes; what was rounded is read again as it is.
        users = _users(files, packed=False)
    filled = [user for user in users.values() if user.rows]
    if not filled:
        raise InputError(f"{files[0]}: no user has an example: get the file again")
    columns = {
        name: _join(name, [user.columns[name] for user in filled], allocate)
        for name in filled[0].columns
    }
    offsets = np.cumsum([0, *(user.rows for user in users.values())], dtype=np.int64)
    return Columns(columns, Owners(tuple(users), offsets), tuple(_notes(users, columns)))


def _is_mixed(users: dict[str, _User]) -> bool:
    columns = (user.columns.get("x") for user in users.values())
    types = {column.dtype for column in columns if isinstance(column, np.ndarray)}
    return np.dtype(np.uint8) in types and len(types) > 1


def _notes(users: dict[str, _User], columns: dict[str, Column]) -> Iterator[str]:
    empty = [name for name, user in users.items() if not user.rows]
    if empty:
        yield f"clients without any example: {len(empty)}, the first is {empty[0]!r}"
    x = columns.get("x")
    if isinstance(x, np.ndarray) and x.dtype == np.float32 and x.shape[1:] in _IMAGE.values():
        yield f"images: {NOT_BYTES}"


def _users(paths: Sequence[Path], *, packed: bool) -> dict[str, _User]:
    """Every user of all shards, checked alone and against the first one."""
    users: dict[str, _User] = {}
    origin: dict[str, Path] = {}
    first: _User | None = None
    for path in paths:
        for name, user in _shard(path, packed=packed):
            if name in users:
                raise InputError(
                    f"user {name!r} occurs in {origin[name]} and in {path}: rename one, or give "
                    "only one of the files"
                )
            users[name], origin[name] = user, path
            if user.rows:
                first = first or user
                _check_alike(user, first)
    return users


def _check_alike(user: _User, first: _User) -> None:
    for (name, column), (expected, other) in zip(
        user.columns.items(), first.columns.items(), strict=True
    ):
        if name != expected:
            raise InputError(
                f"{user.where}: has a column {name!r} where {first.where} has {expected!r}: give "
                "shards of one data set"
            )
        if not isinstance(column, Strings) and not isinstance(other, Strings):
            if column.shape[1:] == other.shape[1:]:
                continue
            raise InputError(
                f"{user.where}: rows of {name!r} have shape {column.shape[1:]} where {first.where} "
                f"has {other.shape[1:]}: give shards of one data set"
            )


def _shard(path: Path, *, packed: bool) -> Iterator[tuple[str, _User]]:
    content = _parse(path)
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
        if not isinstance(name, str) or not _is_text(name):
            raise InputError(f"{path}: user number {number} has a name that is no text: rename it")
        if name in seen:
            raise InputError(f"{path}: user {name!r} is listed twice: list each user once")
        seen.add(name)
        if name not in data:
            raise InputError(f"{path}: user {name!r} has no user_data: {_REMEDY}")
        # Taken out, so that a shard shrinks while what is made of it grows.
        yield name, _user(data.pop(name), count, f"{path}: user {name!r}", packed=packed)
    if data:
        raise InputError(f"{path}: user_data of {next(iter(data))!r}, who is not in users: add it")


def _parse(path: Path) -> dict[str, Any]:
    file_size(path)
    with reading(str(path), _REMEDY):
        content = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_unique)
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object: give a file in the layout of LEAF")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON allows a key twice, and the last one would win unseen."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"key {key!r} occurs twice")
        content[key] = value
    return content


def _entry(content: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise InputError(f"{where}: has no {key!r}: {_REMEDY}")
    if not isinstance(content[key], kind):
        found = type(content[key]).__name__
        raise InputError(f"{where}: {key!r} is a {found}: expected a {kind.__name__}")
    return content[key]


def _is_text(value: str) -> bool:
    """JSON can say halves of characters, which UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _user(data: Any, count: Any, where: str, *, packed: bool) -> _User:
    x, y = (_entry(data, key, list, where) for key in ("x", "y"))
    if len(x) != len(y):
        raise InputError(f"{where}: has {len(x)} of 'x' but {len(y)} of 'y': {_REMEDY}")
    if type(count) is not int or count != len(x):
        said = count if type(count) is int else type(count).__name__
        raise InputError(f"{where}: has {len(x)} examples but num_samples says {said}: {_REMEDY}")
    if not x:
        return _User(where, {}, 0)
    columns: dict[str, Column] = {}
    if _all_text(x):
        columns["text"] = pack(x, f"{where}: x")
    else:
        columns["x"] = _inputs(x, where, packed=packed)
    if "text" in columns and _all_text(y):
        columns["next"] = pack(y, f"{where}: y")
    else:
        columns["y"] = _labels(y, where)
    return _User(where, columns, len(x))


def _all_text(values: list[Any]) -> bool:
    return set(map(type, values)) == {str}


def _inputs(values: list[Any], where: str, *, packed: bool) -> Array:
    """Rows of numbers: whole numbers stay so, fractions become bytes if they can."""
    single = not isinstance(values[0], list)
    rows = [[value] for value in values] if single else values
    kinds: set[type] = set()
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(rows[0]) or not row:
            said = f"has {len(row)} values" if isinstance(row, list) else "is no list"
            raise InputError(
                f"{where}: row {i} of 'x' {said}: expected rows of equal length, with at least one "
                "value"
            )
        kinds.update(map(type, row))
        if not kinds <= {int, float}:
            found = next(iter(kinds - {int, float})).__name__
            raise InputError(f"{where}: row {i} of 'x' holds a {found}: expected numbers or text")
    array = _array(rows, where, np.float64 if float in kinds else np.int64)
    if single:
        shape: tuple[int, ...] = ()
    else:
        shape = _IMAGE.get(array.shape[1], array.shape[1:])
    array = array.reshape(len(rows), *shape)
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
    small = as_bytes(array) if fractions else None
    return array.astype(np.float32) if small is None else small


def _array(values: list[Any], where: str, dtype: type) -> Array:
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise InputError(
            f"{where}: holds a whole number beyond 64 bits: use smaller ones"
        ) from None


def _labels(values: list[Any], where: str) -> Array:
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not 0 <= value < 2**63 or value != int(value):
            said = value if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise InputError(
                f"{where}: label {i} is {str(said)[:40]}: expected a whole number from 0"
            )
    return np.array([int(value) for value in values], np.int64)


def _join(name: str, parts: list[Column], allocate: Allocate) -> Column:
    """One column of all users' parts, one after the other."""
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
