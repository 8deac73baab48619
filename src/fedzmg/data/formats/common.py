"""Helpers shared by all readers: paths, errors, grouping by client, labels, strings and pixels."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Allocate, Array, Owners, Strings
from fedzmg.errors import InputError, unknown

_SMALL = 2**26
_BEST_RATIO = 256

Ids = npt.NDArray[np.int64]
OnePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = OnePath | Sequence[OnePath]
"""One path or several."""

NOT_BYTES = "values are not multiples of 1/255: kept as float32, which needs four times the space"
REMEDY = "is it complete? get the file again"


def as_paths(given: Paths, kind: str = "file") -> list[Path]:
    """Turn one path or several into a list."""
    several = [given] if isinstance(given, str | os.PathLike) else given
    try:
        paths = [Path(path) for path in several]
    except TypeError:
        shown = repr(given)[:80]
        raise InputError(f"{shown} is not a path: give a path or a list of paths") from None
    if not paths:
        raise InputError(f"no {kind} is given: give at least one")
    return paths


@contextlib.contextmanager
def reading(where: str, remedy: str = "check the path, or get the file again") -> Iterator[None]:
    """Turn any error of a parser into one line that names the file."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{where}: not enough memory to read it: split it into parts") from None
    except Exception as error:  # parsers of other packages raise anything on damaged files
        cause = error.args[0] if isinstance(error, KeyError) and error.args else error
        reason = " ".join(str(getattr(error, "strerror", None) or cause).split())[:200]
        raise InputError(
            f"{where}: cannot be read ({reason or type(error).__name__}): {remedy}"
        ) from None


def file_size(path: Path) -> int:
    """Return the bytes of a regular file."""
    with reading(str(path)):
        if not path.exists():
            raise InputError(f"{path}: no such file: check the path")
        if not path.is_file():
            raise InputError(f"{path}: is not a regular file: give the path of a file")
        return path.stat().st_size


def refuse_bomb(where: str, size: int, stored: int) -> None:
    """Refuse, before allocating it, a size that ``stored`` bytes cannot plausibly unpack to."""
    if size > max(_SMALL, _BEST_RATIO * stored):
        raise InputError(
            f"{where}: claims {size:,} bytes in {stored:,}, as an archive bomb does: get it again"
        )


class Grouping(NamedTuple):
    """Rows sorted by client: row ``i`` of the result is row ``order[i]`` of the file."""

    order: Ids
    owners: Owners | None


def ungrouped(rows: int) -> Grouping:
    """Keep the order of rows without clients."""
    return Grouping(np.arange(rows, dtype=np.int64), None)


def group(owner: Ids, names: Sequence[str]) -> Grouping:
    """Sort rows by client, keeping their order inside a client; ``owner`` indexes ``names``."""
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    return Grouping(np.argsort(owner, kind="stable"), Owners(tuple(names), offsets))


def by_client(clients: Any, rows: int, where: str) -> Grouping:
    """Sort rows by client id."""
    ids = numbers_or_strings(clients, f"{where}: client ids")
    if len(ids) != rows:
        raise InputError(f"{where}: {len(ids)} client ids for {rows} rows: give one for each row")
    if isinstance(ids, list):
        if "" in ids:
            raise InputError(f"{where}: the client id in row {ids.index('')} is empty: fill it in")
        return group(*codes(ids))
    present, owner = np.unique(ids, return_inverse=True)
    return group(owner.astype(np.int64), [str(name) for name in present.tolist()])


def by_writer(writers: Array) -> Grouping:
    """Sort rows by number of writer; writer 17 is called ``w0017``."""
    present, owner = np.unique(writers, return_inverse=True)
    digits = max(4, len(str(int(present[-1]))))
    return group(owner.astype(np.int64), [f"w{number:0{digits}d}" for number in present.tolist()])


def codes(values: Sequence[str]) -> tuple[Ids, tuple[str, ...]]:
    """Number strings in sorted order; strings of digits sort by value.

    >>> codes(["10", "9", "10"])[0].tolist()
    [1, 0, 1]
    """
    different = set(values)
    numeric = all(re.fullmatch("0|[1-9][0-9]{,17}", value) for value in different)
    names = tuple(sorted(different, key=int) if numeric else sorted(different))
    known = {name: i for i, name in enumerate(names)}
    return np.fromiter((known[value] for value in values), np.int64, len(values)), names


def labels(
    values: Any, where: str, classes: Collection[str] | None = None
) -> tuple[Ids, tuple[str, ...]]:
    """Convert labels to ids from 0; return the class names too, where there are names.

    Args:
        values: whole numbers from 0, or names of classes.
        where: file and column, for messages.
        classes: the names in the order of their ids; sorted by default.
    """
    given = numbers_or_strings(values, f"{where}: labels")
    names = None if classes is None else tuple(classes)
    if names is not None and len(set(names)) != len(names):
        raise InputError(f"classes = {', '.join(names)}: name each class once")
    if not isinstance(given, list):
        refuse_row(given < 0, f"{where}: label", given, "expected a whole number from 0")
        if names is not None:
            allowed = f"expected 0 to {len(names) - 1}, one for each of the classes"
            refuse_row(given >= len(names), f"{where}: label", given, allowed)
        return given, names or ()
    if names is None:
        return codes(given)
    known = {name: i for i, name in enumerate(names)}
    for row, name in enumerate(given):
        if name not in known:
            raise InputError(f"{where}: row {row}: {unknown('class', name, names)}")
    return np.array([known[name] for name in given], dtype=np.int64), names


def classes_note(names: Sequence[str]) -> tuple[str, ...]:
    """List the class names in the order of their ids, in one line."""
    if not names:
        return ()
    plain = (n if n.isprintable() and not set(',"') & set(n) else json.dumps(n) for n in names)
    return (f"classes: {', '.join(plain)}",)


def numbers_or_strings(values: Any, what: str) -> Ids | list[str]:
    """Return a column of whole numbers as int64, or of strings as a list."""
    with reading(what, "give whole numbers or strings"):
        # A list of strings stays a list: an array would give each the space of the longest.
        if isinstance(values, list | tuple) and any(isinstance(v, str | bytes) for v in values):
            return as_strings(list(values), what)
        array = np.asarray(values)
    if array.ndim != 1:
        raise InputError(f"{what} have shape {array.shape}: give one for each row")
    if array.dtype.kind in "USO":
        entries = array.tolist()
        if not entries or not all(isinstance(entry, int) for entry in entries):
            return as_strings(entries, what)
        try:
            return np.array(entries, dtype=np.int64)
        except OverflowError:
            raise InputError(f"{what} hold numbers beyond 64 bits: use smaller ones") from None
    if array.dtype.kind == "f":
        bad = ~(np.abs(array) < 2.0**63) | (array != np.rint(array))
        refuse_row(bad, f"{what} hold", array, "expected whole numbers or strings")
    elif array.dtype.kind == "u":
        bad = array > np.uint64(2**63 - 1)
        refuse_row(bad, f"{what} hold", array, "expected at most 2**63 - 1")
    elif array.dtype.kind not in "bi":
        raise InputError(f"{what} have type {array.dtype}: expected whole numbers or strings")
    return array.astype(np.int64)


def as_strings(values: list[Any], what: str) -> list[str]:
    """Decode bytes in place and check that every entry is a string of UTF-8."""
    if None in values:
        raise InputError(f"{what} hold nothing in row {values.index(None)}: fill it in")
    for row, value in enumerate(values):
        try:
            text = value.decode() if isinstance(value, bytes) else value
            if not isinstance(text, str):
                kind = type(value).__name__
                raise InputError(f"{what} hold a {kind} in row {row}: expected a string")
            text.encode()
        except UnicodeError:
            raise InputError(f"{what} are not UTF-8 in row {row}: correct that row") from None
        values[row] = text
    return values


def refuse_row(bad: Array, what: str, values: Array, remedy: str) -> None:
    """Refuse the first value marked as bad."""
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"{what} {values[row]} in row {row}: {remedy}")


def fill(allocate: Allocate, name: str, values: Array) -> Array:
    """Copy values into an allocated column, in native byte order."""
    column = allocate(name, values.shape, values.dtype.newbyteorder("="))
    column[...] = values
    return column


def pack(values: Sequence[str], where: str) -> Strings:
    """Store strings end to end."""
    encoded = []
    for row, value in enumerate(values):
        try:
            encoded.append(value.encode())
        except UnicodeError:
            raise InputError(f"{where}: the text in row {row} is not UTF-8: correct it") from None
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return Strings(np.frombuffer(bytearray().join(encoded), np.uint8), offsets)


def check_numbers(values: Array, where: str) -> None:
    """Refuse types other than numbers of at most eight bytes, and values that are not finite."""
    if values.dtype.hasobject:
        raise InputError(f"{where}: holds Python objects: save numbers, or strings with dtype=str")
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise InputError(f"{where}: has type {values.dtype}: expected numbers of at most 64 bits")
    _refuse_infinite(values, where, "NaN or infinity")


def as_float32(values: Array, where: str) -> npt.NDArray[np.float32]:
    """Convert numbers ``[n, ...]`` to float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values.astype(np.float32)
    _refuse_infinite(numbers, where, "NaN, infinity, or a number beyond 32 bits")
    return numbers


def _refuse_infinite(values: Array, where: str, kinds: str) -> None:
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        row = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
        raise InputError(f"{where}: row {row} holds {kinds}: remove it or fill it in")


def choose_features(
    have: Sequence[str],
    client: str | None,
    label: str | None,
    features: Sequence[str] | None,
    where: str,
) -> list[str]:
    """Return the names of the columns to learn from."""
    special = [name for name in (client, label) if name is not None]
    for name in (*special, *(features or ())):
        if name not in have:
            raise InputError(f"{where}: {unknown('column', str(name), have)}")
    chosen = [n for n in have if n not in special] if features is None else list(features)
    twice = next((n for n, uses in Counter([*special, *chosen]).items() if uses > 1), None)
    if twice is not None:
        raise InputError(f"{where}: column {twice!r} is used twice: use it once")
    if not chosen and features != []:
        raise InputError(f"{where}: no column is left to learn from: name some in features")
    return chosen


def check_fractions(pixels: Array, where: str) -> None:
    """Refuse pixels outside 0 to 1."""
    bad = ~((pixels >= 0) & (pixels <= 1))
    if bad.any():
        row = int(np.argmax(bad.reshape(len(pixels), -1).any(axis=1)))
        value = float(pixels[row][bad[row]].flat[0])
        raise InputError(
            f"{where}: example {row} has a pixel of {value:g}: expected values from 0 to 1"
        )


def as_bytes(fractions: Array) -> npt.NDArray[np.uint8] | None:
    """Convert values from 0 to 1 to 0 to 255; None if one is not a multiple of 1/255.

    >>> as_bytes(np.array([0.0, 0.2, 1.0])).tolist()
    [0, 51, 255]
    >>> as_bytes(np.array([0.5])) is None
    True
    """
    scaled = fractions * fractions.dtype.type(255)
    whole: Array = np.rint(scaled)
    return None if (np.abs(scaled - whole) > 1e-3).any() else whole.astype(np.uint8)
