"""What readers share.

Rows sorted by client, labels as whole numbers, strings end to end, and bounds for files that claim
to be larger than they are.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Owners, Strings
from fedzmg.errors import InputError, unknown

_BLOCK = 2**24
_ALWAYS_FINE = 2**26
_BEST_RATIO = 256

Ids = npt.NDArray[np.int64]
OnePath: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = OnePath | Sequence[OnePath]
"""What readers take: a path, or several."""


def as_paths(given: Paths) -> list[Path]:
    """One path or several, each a string or a ``Path``.

    Raises:
        InputError: for anything else.
    """
    # A string is a sequence of strings, but never meant as one.
    several = [given] if isinstance(given, str | os.PathLike) else given
    try:
        return [Path(path) for path in several]
    except TypeError:
        said = repr(given)[:80]
        raise InputError(f"{said} is no path: give a path or a list of paths") from None


@contextlib.contextmanager
def reading(where: str, remedy: str = "check the path, or get the file again") -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into one line that names the place."""
    try:
        yield
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{where}: not enough memory to read it: split it into parts") from None
    # Parsers of other packages promise no set of exceptions for damaged files.
    except Exception as error:
        # A KeyError shows its text in quotes.
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        reason = " ".join(str(getattr(error, "strerror", None) or said).split())[:200]
        raise InputError(
            f"{where}: cannot be read ({reason or type(error).__name__}): {remedy}"
        ) from None


def file_size(path: Path) -> int:
    """Bytes of a file.

    Raises:
        InputError: for what is no plain file; reading a pipe or a device might never end.
    """
    with reading(str(path)):
        if not path.exists():
            raise InputError(f"{path}: no such file: check the path")
        if not path.is_file():
            raise InputError(f"{path}: is no plain file: give the path of a file")
        return path.stat().st_size


def unpacked_bound(stored: int) -> int:
    """The most bytes that an honest file of ``stored`` bytes unpacks to."""
    return max(_ALWAYS_FINE, _BEST_RATIO * stored)


def refuse_bomb(where: str, size: int, stored: int) -> None:
    """Refuse a size that no honest file of ``stored`` bytes unpacks to, before it is allocated."""
    if size > unpacked_bound(stored):
        raise InputError(
            f"{where}: claims {size:,} bytes of data in {stored:,} bytes of file, as a damaged "
            "file or an archive bomb does: get it again, or store it uncompressed"
        )


def blocks(
    stream: IO[bytes], rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], where: str
) -> Iterator[tuple[slice, Array]]:
    """Rows of a stream, some MiB at a time, with their place."""
    width = dtype.itemsize * math.prod(shape)
    step = max(1, _BLOCK // width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        with reading(where):
            data = stream.read(count * width)
        if len(data) != count * width:
            raise InputError(f"{where}: ends before row {first + count}: get the file again")
        yield slice(first, first + count), np.frombuffer(data, dtype).reshape(count, *shape)


class Grouping(NamedTuple):
    """Rows sorted by client: row ``i`` of the result is row ``order[i]`` of the file."""

    order: Ids
    owners: Owners | None

    @property
    def place(self) -> Ids:
        """Where each row of the file goes."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(self.order))
        return place


def ungrouped(rows: int) -> Grouping:
    """Rows that belong to nobody yet."""
    return Grouping(np.arange(rows, dtype=np.int64), None)


def group(owner: Ids, names: Sequence[str]) -> Grouping:
    """Sort rows by client, keeping their order inside a client; ``owner`` indexes ``names``."""
    ends = np.cumsum(np.bincount(owner, minlength=len(names)))
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    return Grouping(np.argsort(owner, kind="stable"), Owners(tuple(names), offsets))


def by_client(clients: Any, rows: int, where: str) -> Grouping:
    """Sort rows by the client id that each of them has.

    Raises:
        InputError: unless there is one whole number or one string for every row.
    """
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
    """Each string as its place among the different strings in order; numbers in order of size.

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
    """Labels as whole numbers, and the names of classes where there are names.

    Args:
        values: whole numbers from 0, or names of classes.
        where: file and column, for messages.
        classes: the names in the order of their ids; without it they are sorted.

    Raises:
        InputError: for a label that is neither, or is none of ``classes``.
    """
    given = numbers_or_strings(values, f"{where}: labels")
    names = None if classes is None else tuple(classes)
    if names is not None and len(set(names)) != len(names):
        raise InputError(f"classes = {', '.join(names)}: name each class once")
    if not isinstance(given, list):
        _refuse_row(given < 0, f"{where}: label {{}}", given, "expected a whole number from 0")
        if names is not None:
            allowed = f"expected 0 to {len(names) - 1}, one for each of the classes"
            _refuse_row(given >= len(names), f"{where}: label {{}}", given, allowed)
        return given, names or ()
    if names is None:
        ids, names = codes(given)
        return ids, names
    known = {name: i for i, name in enumerate(names)}
    for row, name in enumerate(given):
        if name not in known:
            raise InputError(f"{where}: row {row}: {unknown('class', name, names)}")
    return np.array([known[name] for name in given], dtype=np.int64), names


def classes_note(names: Sequence[str]) -> tuple[str, ...]:
    """One line with the names of classes in the order of their ids, if there are names."""
    if not names:
        return ()
    plain = (n if n.isprintable() and not set(',"') & set(n) else json.dumps(n) for n in names)
    return (f"classes: {', '.join(plain)}",)


def numbers_or_strings(values: Any, what: str) -> Ids | list[str]:
    """A column of whole numbers as int64, or of strings as a list.

    Raises:
        InputError: for anything else, naming the first row that is neither.
    """
    with reading(what, "give whole numbers or strings"):
        # A list of strings stays a list: an array would give each the room of the longest.
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
        _refuse_row(bad, f"{what} hold {{}}", array, "expected whole numbers or strings")
    elif array.dtype.kind == "u":
        bad = array > np.uint64(2**63 - 1)
        _refuse_row(bad, f"{what} hold {{}}", array, "expected at most 2**63 - 1")
    elif array.dtype.kind not in "bi":
        raise InputError(f"{what} have type {array.dtype}: expected whole numbers or strings")
    return array.astype(np.int64)


def as_strings(values: list[Any], what: str) -> list[str]:
    """A column of strings; bytes are decoded, in place.

    Raises:
        InputError: for an entry that is neither, naming its row.
    """
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


def _refuse_row(bad: Array, message: str, values: Array, remedy: str) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise InputError(f"{message.format(values[row])} in row {row}: {remedy}")


def pack(values: Sequence[str], where: str) -> Strings:
    """Strings end to end.

    Raises:
        InputError: for a string that UTF-8 cannot say.
    """
    encoded = []
    for row, value in enumerate(values):
        try:
            encoded.append(value.encode())
        except UnicodeError:
            raise InputError(f"{where}: the text in row {row} is not UTF-8: correct it") from None
    lengths = np.fromiter((len(value) for value in encoded), np.int64, len(encoded))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Strings(np.frombuffer(bytearray().join(encoded), np.uint8), offsets)


def check_numbers(block: Array, first: int, where: str) -> None:
    """Refuse values that are not finite; ``first`` is the row at which the block begins."""
    if block.dtype.kind == "f" and not np.isfinite(block).all():
        row = first + int(np.argmax(~np.isfinite(block).reshape(len(block), -1).all(axis=1)))
        raise InputError(f"{where}: row {row} holds NaN or infinity: remove it or fill it in")


def check_type(dtype: np.dtype[Any], where: str) -> None:
    """Refuse what is no number of at most eight bytes."""
    if dtype.hasobject:
        raise InputError(
            f"{where}: holds Python objects, which are not loaded: save an array of numbers, or "
            "of strings with dtype=str"
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise InputError(f"{where}: has type {dtype}: expected numbers of at most 64 bits")
