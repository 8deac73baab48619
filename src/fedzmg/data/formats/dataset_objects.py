"""Dataset objects of Hugging Face, and the partitions that flwr-datasets makes of them.

Neither package is imported: an object counts as a dataset if it has ``column_names``, a length,
and gives a column for ``dataset[name]``. Rows are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Column, Columns, in_memory
from fedzmg.data.formats.image_folder import Wanted, check_wanted, decode_all
from fedzmg.data.formats.rows import (
    Grouping,
    by_client,
    check_type,
    classes_note,
    group,
    labels,
    numbers_or_strings,
    pack,
    reading,
    ungrouped,
)
from fedzmg.data.formats.tabular import Names, as_float32, choose, joined
from fedzmg.errors import InputError

_REMEDY = "look at that row of the dataset"


class _Part(NamedTuple):
    """A dataset object and its name in messages."""

    where: str
    dataset: Any


def from_dataset(
    dataset: Any,
    *,
    client: str | None,
    label: str | None,
    features: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
) -> Columns:
    """Columns of one dataset whose rows know their client.

    Args:
        dataset: a ``datasets.Dataset``, or what behaves like one.
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with labels; None for no labels.
        features: the columns to learn from; all others without it. Several columns must hold
            numbers; one may hold images, arrays or text.
        classes: names of classes in the order of their ids; the dataset's own, or sorted, without.
        size: resize images to this height and width.
        grey: turn images into grey (True) or colour (False).

    Raises:
        InputError: for missing columns and values that cannot be used.
    """
    part = _part(dataset, "dataset")
    chosen = choose(dataset.column_names, client, label, features, part.where)
    rows = len(dataset)
    grouping = ungrouped(rows)
    if client is not None:
        grouping = by_client(_values(part, client), rows, f"{part.where}: column {client!r}")
    return _columns([part], grouping, label, chosen, classes, check_wanted(size, grey))


def from_partitions(
    partitions: Mapping[str, Any] | Sequence[Any],
    *,
    label: str | None,
    features: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
) -> Columns:
    """Columns of one dataset for each client, in the order given.

    Args:
        partitions: datasets by name of client; those of a sequence are called 0, 1, 2, ...
        label: the column with labels; None for no labels.
        features: the columns to learn from, as in :func:`from_dataset`.
        classes: names of classes in the order of their ids; the dataset's own, or sorted, without.
        size: resize images to this height and width.
        grey: turn images into grey (True) or colour (False).

    Raises:
        InputError: for clients without rows, datasets that differ in columns, missing columns and
            values that cannot be used.
    """
    named = partitions if isinstance(partitions, Mapping) else dict(enumerate(partitions))
    parts = [_part(dataset, f"client {str(name)!r}") for name, dataset in named.items()]
    if not parts:
        raise InputError("no partition is given: give one dataset for each client")
    chosen = choose(parts[0].dataset.column_names, None, label, features, parts[0].where)
    for part in parts[1:]:
        choose(part.dataset.column_names, None, label, chosen, part.where)
    sizes = [len(part.dataset) for part in parts]
    owner = np.repeat(np.arange(len(parts), dtype=np.int64), sizes)
    grouping = group(owner, [str(name) for name in named])
    return _columns(parts, grouping, label, chosen, classes, check_wanted(size, grey))


def _part(dataset: Any, where: str) -> _Part:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Mapping):
        raise InputError(f"{where}: is several splits: choose one ({', '.join(map(str, names))})")
    # Streams have columns, too, but no length.
    known = all(hasattr(type(dataset), method) for method in ("__getitem__", "__len__"))
    if not isinstance(names, list | tuple) or not known:
        raise InputError(
            f"{where}: a {type(dataset).__name__} has no columns to read: give a datasets.Dataset; "
            "a stream must be loaded first"
        )
    if len(dataset) == 0:
        raise InputError(f"{where}: holds no row: leave it out")
    return _Part(where, dataset)


def _values(part: _Part, name: str) -> Any:
    """A whole column; columns that are made on demand are made."""
    with reading(f"{part.where}: column {name!r}", _REMEDY):
        return part.dataset[name][:]


def _feature(part: _Part, name: str) -> Any:
    features = getattr(part.dataset, "features", None)
    return features.get(name) if isinstance(features, Mapping) else None


def _columns(
    parts: Sequence[_Part],
    grouping: Grouping,
    label: str | None,
    chosen: Sequence[str],
    classes: Sequence[str] | None,
    wanted: Wanted,
) -> Columns:
    columns: dict[str, Column] = {}
    names: tuple[str, ...] = ()
    rows = len(grouping.order)
    if label is not None:
        ids, names = _labels(parts, label, classes)
        columns["y"] = ids[grouping.order]
    place = grouping.place
    first = next(_entries(parts, chosen[0]))[1]
    if len(chosen) == 1 and isinstance(first, str):
        texts = [text for part in parts for text in _strings(part, chosen[0])]
        columns["text"] = pack([texts[i] for i in grouping.order], parts[0].where)
    elif len(chosen) == 1 and _is_image(first):
        images = _images(parts, chosen[0])
        # Objects in memory are as large as they are: nothing is hidden in them.
        columns["x"] = decode_all(images, rows, place, in_memory, wanted, stored=2**60)
    elif len(chosen) == 1 and np.ndim(first) > 1:
        columns["x"] = _stack(parts, chosen[0], rows, place)
    else:
        table = [_numbers(parts, name) for name in chosen]
        columns["x"] = np.concatenate(table, axis=1)[grouping.order]
    return Columns(columns, grouping.owners, classes_note(names), names)


def _labels(
    parts: Sequence[_Part], label: str, classes: Sequence[str] | None
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    own = getattr(_feature(parts[0], label), "names", None)
    given: list[Names] = []
    for part in parts:
        where = f"{part.where}: column {label!r}"
        if getattr(_feature(part, label), "names", None) != own:
            raise InputError(f"{where}: has other classes than {parts[0].where}: make them alike")
        values = numbers_or_strings(_values(part, label), f"{where}: labels")
        if own is not None and not isinstance(values, list):
            values, _ = labels(values, where, own)
            # Ids of the dataset's own classes; other classes were asked for by name.
            given.append(values if classes is None else [own[i] for i in values])
        else:
            given.append(values)
        if isinstance(given[-1], list) != isinstance(given[0], list):
            raise InputError(f"{where}: mixes numbers and names of classes: use one of them")
    where = f"{parts[0].where}: column {label!r}"
    return labels(joined(given), where, own if classes is None else classes)


def _entries(parts: Sequence[_Part], name: str) -> Iterator[tuple[str, Any]]:
    """Each entry of a column with its place, made one at a time."""
    for part in parts:
        with reading(f"{part.where}: column {name!r}", _REMEDY):
            column = iter(part.dataset[name])
        for row in range(len(part.dataset)):
            where = f"{part.where}: column {name!r}, row {row}"
            with reading(where, _REMEDY):
                entry = next(column)
            yield where, entry


def _strings(part: _Part, name: str) -> list[str]:
    where = f"{part.where}: column {name!r}: texts"
    values = numbers_or_strings(list(_values(part, name)), where)
    if not isinstance(values, list):
        raise InputError(f"{where} are numbers: give strings in all partitions")
    return values


def _is_image(entry: Any) -> bool:
    """A packed image, or an object of Pillow."""
    packed = isinstance(entry, bytes) or (isinstance(entry, Mapping) and "bytes" in entry)
    return packed or (hasattr(entry, "mode") and hasattr(entry, "convert"))


def _images(parts: Sequence[_Part], name: str) -> Iterator[tuple[str, Any]]:
    for where, entry in _entries(parts, name):
        source = entry.get("bytes") if isinstance(entry, Mapping) else entry
        if not _is_image(source):
            raise InputError(f"{where}: holds no image but {type(source).__name__}: {_REMEDY}")
        yield where, source


def _stack(parts: Sequence[_Part], name: str, rows: int, place: Array) -> Array:
    """Arrays of one shape; images of bytes with three colours get them first."""
    x: Array | None = None
    for row, (where, entry) in enumerate(_entries(parts, name)):
        with reading(where, _REMEDY):
            array = _channels_first(np.asarray(entry, dtype=_type(parts[0], name)))
        check_type(array.dtype, where)
        if x is None:
            x = np.empty((rows, *array.shape), array.dtype)
        if array.shape != x.shape[1:]:
            raise InputError(
                f"{where}: has shape {array.shape} but the first has {x.shape[1:]}: make them alike"
            )
        if array.dtype != x.dtype:
            raise InputError(f"{where}: has type {array.dtype} but the first has {x.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"{where}: holds NaN or infinity: remove it or fill it in")
        x[place[row]] = array
    assert x is not None
    return x


def _type(part: _Part, name: str) -> Any:
    """The type that the dataset declares: in lists of lists it is lost."""
    try:
        dtype = np.dtype(getattr(_feature(part, name), "dtype", None) or "O")
    except TypeError:
        return None
    return dtype if dtype.kind in "biuf" else None


def _channels_first(array: Array) -> Array:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[0] == 3:
        return array
    if array.shape[2] == 1:
        return array[:, :, 0]
    return array.transpose(2, 0, 1) if array.shape[2] == 3 else array


def _numbers(parts: Sequence[_Part], name: str) -> npt.NDArray[np.float32]:
    columns = []
    for part in parts:
        where = f"{part.where}: column {name!r}"
        values = _values(part, name)
        with reading(where, "give numbers, or lists of equally many numbers"):
            array = np.asarray(values)
            if array.dtype.kind == "O" and None in values:
                raise InputError(f"{where}: row {values.index(None)} has no value: fill it in")
        if array.dtype.kind not in "biuf" or array.ndim > 2:
            raise InputError(
                f"{where}: holds {type(values[0]).__name__}, not numbers: name the columns to use "
                "in features"
            )
        columns.append(as_float32(array.reshape(len(array), -1), where))
    if len({column.shape[1] for column in columns}) != 1:
        raise InputError(f"column {name!r}: partitions differ in its width: make them alike")
    return np.concatenate(columns)
