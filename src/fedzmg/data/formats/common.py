"""Steps shared by all readers: paths, errors, clients, labels, strings, numbers and pixels."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Column, Columns, Owners, Strings, rows_of
from fedzmg.errors import InputError, unknown

_SMALL = 2**26
_BEST_RATIO = 256

Ids = npt.NDArray[np.int64]
OnePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = OnePath | Sequence[OnePath]
"""One path or several."""
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
        raise InputError(
            f"{len(paths)} paths are given: give {'one' if single else 'at least one'}"
        )
    kind = "folder" if folder else "regular file"
    for path in paths:
        with reading(str(path)):
            if not path.exists():
                raise InputError(f"{path}: no such {kind}: check the path")
            if not (path.is_dir() if folder else path.is_file()):
                raise InputError(f"{path}: is not a {kind}: check the path")
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
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise InputError(
            f"{where}: cannot be read ({reason or type(error).__name__}): {remedy}"
        ) from None


def refuse_bomb(where: str, size: int, stored: int) -> None:
    """Refuse, before allocating it, a size that ``stored`` bytes cannot plausibly unpack to."""
    if size > max(_SMALL, _BEST_RATIO * stored):
        raise InputError(
            f"{where}: claims {size:,} bytes in {stored:,}, as an archive bomb does: get it again"
        )


class Grouping(NamedTuple):
    """Rows sorted by client: row ``i`` of the result is row ``order[i]`` of the file."""

    order: Ids
    owners: Owners | None = None


def group(owner: Ids, names: Sequence[str]) -> Grouping:
    """Sort rows by client, keeping their order inside a client; ``owner`` indexes ``names``."""
    counts = np.bincount(owner, minlength=len(names))
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    return Grouping(np.argsort(owner, kind="stable"), Owners(tuple(names), offsets))


def by_client(clients: Any, rows: int, where: str) -> Grouping:
    """Sort rows by client id; without ids they keep their order."""
    if clients is None:
        return Grouping(np.arange(rows))
    ids = numbers_or_strings(clients, f"{where}: client ids")
    if len(ids) != rows:
        raise InputError(f"{where}: {len(ids)} client ids for {rows} rows: give one for each row")
    if isinstance(ids, list) and "" in ids:
        raise InputError(f"{where}: the client id in row {ids.index('')} is empty: fill it in")
    return group(*codes(ids if isinstance(ids, list) else [str(number) for number in ids.tolist()]))


def codes(values: Sequence[str]) -> tuple[Ids, tuple[str, ...]]:
    """Number strings in sorted order; whole numbers sort by value.

    >>> codes(["10", "9", "10"])[0].tolist()
    [1, 0, 1]
    """
    different = set(values)
    numeric = all(re.fullmatch("0|-?[1-9][0-9]{,18}", value) for value in different)
    names = tuple(sorted(different, key=int) if numeric else sorted(different))
    known = {name: i for i, name in enumerate(names)}
    return np.fromiter((known[value] for value in values), np.int64, len(values)), names


def labels(
    values: Any, where: str, classes: Sequence[str] | None = None
) -> tuple[Ids, tuple[str, ...]]:
    """Convert whole numbers or class names to ids from 0; return the names too, if there are any.

    ``classes`` are the names in the order of their ids; sorted by default.
    """
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
        if isinstance(values, list | tuple) and any(isinstance(v, str | bytes) for v in values):
            return as_strings(values, what)
        array = np.asarray(values)
        if array.dtype.kind in "USO":
            entries = array.tolist()
            if not entries or any(isinstance(entry, str | bytes) for entry in entries):
                return as_strings(entries, what)
            array = np.array(entries)
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
            raise InputError(f"{what}: {value!r:.40} in row {row} is not UTF-8 text") from None
        texts.append(text)
    return texts


def refuse_row(bad: Array, what: str, values: Array, remedy: str) -> None:
    """Refuse the first value marked as bad."""
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"{what} {values[row]} in row {row}: {remedy}")


def assemble(
    where: str,
    grouping: Grouping,
    features: Features,
    y: Any = None,
    *,
    classes: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Columns:
    """Make sorted columns of features and labels in the order of the file."""
    columns: dict[str, Column] = {}
    names: tuple[str, ...] = ()
    order = grouping.order
    if y is not None:
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
    return Columns(columns, grouping.owners, tuple(notes), names)


def pack(values: Sequence[Any], where: str) -> Strings:
    """Store strings end to end."""
    encoded = [text.encode() for text in as_strings(values, where)]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return Strings(np.frombuffer(bytearray().join(encoded), np.uint8), offsets)


def join(parts: Sequence[Column]) -> Column:
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


class Client(NamedTuple):
    """Columns of one client, none for a client without examples."""

    name: str
    where: str
    columns: Mapping[str, Column]


def collect(where: str, found: Iterable[Client]) -> Columns:
    """Join the columns of all clients."""
    clients = list(found)
    filled = [client for client in clients if client.columns]
    if not filled:
        raise InputError(f"{where}: no client has an example: get the file again")
    first, *others = ({n: _shape(c) for n, c in client.columns.items()} for client in filled)
    for client, shapes in zip(filled[1:], others, strict=True):
        if shapes != first:
            raise InputError(f"{client.where}: has {shapes} where others have {first}: correct it")
    columns = {n: join([client.columns[n] for client in filled]) for n in first}
    notes = []
    empty = [client.name for client in clients if not client.columns]
    if empty:
        notes.append(f"clients without any example: {len(empty)}, the first is {empty[0]!r}")
    if isinstance(x := columns.get("x"), np.ndarray) and x.dtype.kind == "f" and x.ndim == 3:
        notes.append("pixels are not multiples of 1/255: kept as float32, in four times the space")
    sizes = [rows_of(next(iter(c.columns.values()))) if c.columns else 0 for c in clients]
    owners = Owners(tuple(c.name for c in clients), np.cumsum([0, *sizes], dtype=np.int64))
    return Columns(columns, owners, tuple(notes))


def _shape(column: Column) -> str:
    return "text" if isinstance(column, Strings) else f"shape {column.shape[1:]}"


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


def side_by_side(columns: Mapping[str, Any], where: str) -> npt.NDArray[np.float32]:
    """Put columns of numbers, or of lists of equally many numbers, side by side."""
    parts = []
    for name, values in columns.items():
        here = f"{where}: column {name!r}"
        with reading(here, "give numbers, or lists of equally many numbers"):
            if isinstance(values, list) and isinstance(values[0], str | bytes):
                raise ValueError(f"it holds {values[0]!r:.40}")
            array = np.asarray(values)
            check_numbers(array, here)
            parts.append(as_float32(array.reshape(len(array), -1), here))
    return np.concatenate(parts, axis=1)


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
    used = [*special, *chosen]
    if len(set(used)) < len(used) or (not chosen and features is None):
        raise InputError(f"{where}: columns used are {used!r:.200}: name other features, once each")
    return chosen


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
