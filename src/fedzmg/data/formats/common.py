"""Steps shared by all readers: paths, errors, clients, labels, strings, numbers and pixels."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Column, Columns, Grouping, Ids, Strings, group
from fedzmg.errors import InputError, unknown

_SMALL = 2**26
_BEST_RATIO = 256

OnePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = OnePath | Sequence[OnePath]
Names: TypeAlias = Sequence[str] | None
Size: TypeAlias = tuple[int, int] | None  # height and width of images
Entries: TypeAlias = Iterator[tuple[str, Any]]  # name in messages, and value
Coded: TypeAlias = tuple[Ids, tuple[str, ...]]  # number of every entry, and names by number
Features: TypeAlias = Array | Sequence[Any] | Callable[[Ids], Array] | None
"""Numbers, strings, or a function that decodes images in the order it is given."""

REMEDY = "is it complete? get the file again"


def as_paths(given: Paths, *, folder: bool = False, single: bool = False) -> list[Path]:
    """Turn one path or several into a list of existing files, or folders."""
    try:
        paths = [Path(p) for p in ([given] if isinstance(given, str | os.PathLike) else given)]
    except TypeError:
        raise InputError(f"{given!r:.80} is not a path: give a path or a list of paths") from None
    if not paths or (single and len(paths) > 1):
        raise InputError(f"{len(paths)} paths: give {'one' if single else 'at least one'}")
    kind = "folder" if folder else "regular file"
    for path in paths:
        with reading(str(path)):
            if not (path.is_dir() if folder else path.is_file()):
                problem = "is not a" if path.exists() else "no such"
                raise InputError(f"{path}: {problem} {kind}: check the path")
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
        text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        reason = text or type(error).__name__
        raise InputError(f"{where}: cannot be read ({reason}): {remedy}") from None


def refuse_bomb(where: str, size: int, stored: int) -> None:
    """Refuse, before allocating it, a size that ``stored`` bytes cannot plausibly unpack to."""
    if size > max(_SMALL, _BEST_RATIO * stored):
        problem = f"claims {size:,} bytes in {stored:,}, as an archive bomb does"
        raise InputError(f"{where}: {problem}: get it again")


def by_client(clients: Any, rows: int, where: str) -> Grouping:
    """Sort rows by client id; without ids they keep their order."""
    if clients is None:
        return np.arange(rows), None
    ids = numbers_or_strings(clients, f"{where}: client ids")
    if len(ids) != rows:
        raise InputError(f"{where}: {len(ids)} client ids for {rows} rows: give one for each row")
    if isinstance(ids, list) and "" in ids:
        raise InputError(f"{where}: the client id in row {ids.index('')} is empty: fill it in")
    return group(*codes(ids if isinstance(ids, list) else [str(number) for number in ids.tolist()]))


def codes(values: Sequence[str]) -> Coded:
    """Number strings in sorted order; whole numbers sort by value."""
    different = set(values)
    numeric = all(re.fullmatch("0|-?[1-9][0-9]{,18}", value) for value in different)
    names = tuple(sorted(different, key=int) if numeric else sorted(different))
    known = {name: i for i, name in enumerate(names)}
    return np.fromiter((known[value] for value in values), np.int64, len(values)), names


def labels(values: Any, where: str, classes: Names = None) -> Coded:
    """Convert labels to ids from 0; return names of classes, too, sorted or in the given order."""
    given = numbers_or_strings(values, f"{where}: labels")
    names = tuple(classes or ())
    if len(set(names)) != len(names):
        raise InputError(f"classes = {', '.join(names)}: name each class once")
    if not isinstance(given, list):
        most = len(names) - 1 if names else np.iinfo(np.int64).max
        bad = (given < 0) | (given > most)
        refuse_row(bad, f"{where}: label", given, f"expected a whole number from 0 to {most}")
        return given, names
    if not names:
        return codes(given)
    known = {name: i for i, name in enumerate(names)}
    for row, name in enumerate(given):
        if name not in known:
            raise InputError(f"{where}: row {row}: {unknown('class', name, names)}")
    return np.array([known[name] for name in given], dtype=np.int64), names


def numbers_or_strings(values: Any, what: str) -> Ids | list[str]:
    """Return a column of whole numbers as int64, or of strings as a list."""
    with reading(what, "give whole numbers or strings"):
        # A list of strings stays a list: an array would give each the space of the longest.
        entries = values if isinstance(values, list | tuple) else np.asarray(values)
        if isinstance(entries, np.ndarray) and entries.dtype.kind in "USO":
            entries = entries.tolist()
        if not isinstance(entries, np.ndarray) and any(isinstance(e, str | bytes) for e in entries):
            return as_strings(entries, what)
        array = np.asarray(entries)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise InputError(f"{what} are {array.dtype} of shape {array.shape}: give one for each row")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    refuse_row(whole != array, f"{what} hold", array, "expected whole numbers or strings")
    return whole


def as_strings(values: Sequence[Any], what: str) -> list[str]:
    """Decode bytes and check that every entry is a string of UTF-8."""
    texts = []
    for row, value in enumerate(values):
        try:
            text = value.decode() if isinstance(value, bytes) else value
            text.encode()
        except (UnicodeError, AttributeError):
            problem = f"{what}: {value!r:.40} in row {row} is not UTF-8 text: give strings"
            raise InputError(problem) from None
        texts.append(text)
    return texts


def refuse_row(bad: Array, what: str, values: Array, remedy: str) -> None:
    """Refuse the first value marked as bad."""
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"{what} {values[row]} in row {row}: {remedy}")


def assemble(
    where: str, by: Grouping, features: Features, y: Any, *, classes: Names = None,
    notes: Any = (), real: bool = False,
) -> Columns:  # fmt: skip
    """Make sorted columns of features and labels in the order of the file."""
    columns: dict[str, Column] = {}
    names: tuple[str, ...] = ()
    order, owners = by
    if y is not None:
        numeric = real and all(isinstance(one, int | float | np.integer | np.floating) for one in y)
        ids: Array = np.asarray(y if numeric else ())
        if classes or not np.isfinite(ids).all() or (ids % 1 == 0).all():
            ids, names = labels(y, where, classes)
        if len(ids) != len(order):
            raise InputError(f"{where}: {len(ids)} labels for {len(order)} rows: give one for each")
    if callable(features):
        columns["x"] = features(order)
    elif isinstance(features, np.ndarray):
        dtype = features.dtype.newbyteorder("=")
        columns["x"] = np.ascontiguousarray(features[order], dtype=dtype)
    elif features is not None:
        columns["text"] = pack([features[i] for i in order], where)
    if y is not None:
        columns["y"] = ids[order]
    if names:
        plain = (n if n.isprintable() and not set(',"') & set(n) else json.dumps(n) for n in names)
        notes = (*notes, f"classes: {', '.join(plain)}")
    return Columns(columns, owners, tuple(notes), names)


def pack(values: Sequence[Any], where: str) -> Strings:
    """Store strings end to end."""
    encoded = [text.encode() for text in as_strings(values, where)]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return Strings(np.frombuffer(bytearray().join(encoded), np.uint8), offsets)


def check_numbers(values: Array, where: str, limit: str = "") -> None:
    """Refuse types other than numbers of at most eight bytes, and values that are not finite."""
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise InputError(f"{where}: has type {values.dtype}: expected numbers of at most 64 bits")
    if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
        row = int(np.argmin(finite.reshape(len(values), -1).all(axis=1)))
        raise InputError(f"{where}: row {row} holds NaN or infinity{limit}: remove it")


def as_float32(values: Array, where: str) -> npt.NDArray[np.float32]:
    """Convert numbers ``[n, ...]`` to float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values.astype(np.float32)
    check_numbers(numbers, where, ", or a number beyond 32 bits")
    return numbers
