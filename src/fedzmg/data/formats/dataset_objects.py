"""Reader for dataset objects of Hugging Face, and for the partitions flwr-datasets makes of them.

Neither package is imported: an object counts as a dataset if it has ``column_names``, a length,
and gives a column for ``dataset[name]``. Rows are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data.columns import Array, Column, Columns, in_memory
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Grouping, Ids
from fedzmg.data.formats.image_folder import ImageForm, decode_all
from fedzmg.errors import InputError

_REMEDY = "look at that row of the dataset"


class _Part(NamedTuple):
    """Dataset object and its name in messages."""

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
    """Make columns of one dataset with a client column.

    Args:
        dataset: a ``datasets.Dataset``, or an object that behaves like one.
        client: the column with the client of each row; None if rows belong to nobody yet.
        label: the column with labels; None for no labels.
        features: the columns to learn from; all others by default. Several columns must hold
            numbers; one may hold images, arrays or text.
        classes: names of classes in the order of their ids; by default the dataset's own, or
            sorted.
        size: resize images to this height and width.
        grey: convert images to grey (True) or colour (False).
    """
    part = _checked(dataset, "dataset")
    chosen = common.choose_features(dataset.column_names, client, label, features, part.where)
    rows = len(dataset)
    grouping = common.ungrouped(rows)
    if client is not None:
        grouping = common.by_client(_values(part, client), rows, f"{part.where}: column {client!r}")
    return _columns([part], grouping, label, chosen, classes, ImageForm(size, grey).check())


def from_partitions(
    partitions: Mapping[str, Any] | Sequence[Any],
    *,
    label: str | None,
    features: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool | None = None,
) -> Columns:
    """Make columns of one dataset for each client, in the order given.

    Args:
        partitions: datasets by name of client; those of a sequence are called 0, 1, 2, ...
        label: the column with labels; None for no labels.
        features: the columns to learn from, as in :func:`from_dataset`.
        classes: names of classes in the order of their ids, as in :func:`from_dataset`.
        size: resize images to this height and width.
        grey: convert images to grey (True) or colour (False).
    """
    named = partitions if isinstance(partitions, Mapping) else dict(enumerate(partitions))
    parts = [_checked(dataset, f"client {str(name)!r}") for name, dataset in named.items()]
    if not parts:
        raise InputError("no partition is given: give one dataset for each client")
    chosen: Sequence[str] | None = features
    for part in parts:
        chosen = common.choose_features(part.dataset.column_names, None, label, chosen, part.where)
    assert chosen is not None
    sizes = [len(part.dataset) for part in parts]
    owner = np.repeat(np.arange(len(parts), dtype=np.int64), sizes)
    grouping = common.group(owner, [str(name) for name in named])
    return _columns(parts, grouping, label, chosen, classes, ImageForm(size, grey).check())


def _checked(dataset: Any, where: str) -> _Part:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, Mapping):
        raise InputError(f"{where}: is several splits: choose one ({', '.join(map(str, names))})")
    # Streams have columns, too, but no length.
    known = all(hasattr(type(dataset), method) for method in ("__getitem__", "__len__"))
    if not isinstance(names, list | tuple) or not known:
        raise InputError(
            f"{where}: a {type(dataset).__name__} has no columns; a stream must be loaded first"
        )
    if len(dataset) == 0:
        raise InputError(f"{where}: holds no row: leave it out")
    return _Part(where, dataset)


def _values(part: _Part, name: str) -> Any:
    with common.reading(f"{part.where}: column {name!r}", _REMEDY):
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
    form: ImageForm,
) -> Columns:
    columns: dict[str, Column] = {}
    names: tuple[str, ...] = ()
    order = grouping.order
    if label is not None:
        ids, names = _labels(parts, label, classes)
        columns["y"] = ids[order]
    name = chosen[0]
    first = next(_entries(parts, name))[1]
    if len(chosen) == 1 and isinstance(first, str):
        texts = [
            text
            for part in parts
            for text in common.as_strings(
                list(_values(part, name)), f"{part.where}: column {name!r}: texts"
            )
        ]
        columns["text"] = common.pack([texts[i] for i in order], parts[0].where)
    elif len(chosen) == 1 and _is_image(first):
        columns["x"] = decode_all(_images(parts, name), len(order), order, in_memory, form)
    elif len(chosen) == 1 and np.ndim(first) > 1:
        columns["x"] = _stack(parts, name)[order]
    else:
        columns["x"] = np.concatenate([_numbers(parts, name) for name in chosen], axis=1)[order]
    return Columns(columns, grouping.owners, common.classes_note(names), names)


def _labels(
    parts: Sequence[_Part], label: str, classes: Sequence[str] | None
) -> tuple[Ids, tuple[str, ...]]:
    own = getattr(_feature(parts[0], label), "names", None)
    given: list[Any] = []
    kinds = set()
    for part in parts:
        where = f"{part.where}: column {label!r}"
        if getattr(_feature(part, label), "names", None) != own:
            raise InputError(f"{where}: has other classes than {parts[0].where}: make them alike")
        values = common.numbers_or_strings(_values(part, label), f"{where}: labels")
        if own is not None and not isinstance(values, list):
            ids, _ = common.labels(values, where, own)
            # Ids of the dataset's own classes; other classes are matched by name.
            values = ids if classes is None else [own[i] for i in ids]
        kinds.add(isinstance(values, list))
        given += list(values)
    where = f"{parts[0].where}: column {label!r}"
    if len(kinds) > 1:
        raise InputError(f"{where}: mixes numbers and names of classes: use one of them")
    return common.labels(given, where, own if classes is None else classes)


def _entries(parts: Sequence[_Part], name: str) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a column with its name in messages."""
    for part in parts:
        with common.reading(f"{part.where}: column {name!r}", _REMEDY):
            column = iter(part.dataset[name])
        for row in range(len(part.dataset)):
            where = f"{part.where}: column {name!r}, row {row}"
            with common.reading(where, _REMEDY):
                entry = next(column)
            yield where, entry


def _is_image(entry: Any) -> bool:
    """Tell whether an entry is an encoded image or an object of Pillow."""
    encoded = isinstance(entry, bytes) or (isinstance(entry, Mapping) and "bytes" in entry)
    return encoded or (hasattr(entry, "mode") and hasattr(entry, "convert"))


def _images(parts: Sequence[_Part], name: str) -> Iterator[tuple[str, Any]]:
    for where, entry in _entries(parts, name):
        source = entry.get("bytes") if isinstance(entry, Mapping) else entry
        if not _is_image(source):
            raise InputError(f"{where}: is a {type(source).__name__}, not an image: {_REMEDY}")
        yield where, source


def _stack(parts: Sequence[_Part], name: str) -> Array:
    """Stack arrays of one shape, colours first."""
    try:  # the declared type, which lists of lists have lost
        declared = np.dtype(getattr(_feature(parts[0], name), "dtype", None) or "O")
    except TypeError:
        declared = np.dtype("O")
    arrays: list[Array] = []
    for where, entry in _entries(parts, name):
        with common.reading(where, _REMEDY):
            array = np.asarray(entry, dtype=declared if declared.kind in "biuf" else None)
        common.check_numbers(array, where)
        arrays.append(_channels_first(array))
        if array.dtype != arrays[0].dtype or arrays[-1].shape != arrays[0].shape:
            raise InputError(
                f"{where}: has shape {arrays[-1].shape} of {array.dtype} but the first has "
                f"{arrays[0].shape} of {arrays[0].dtype}: make them alike"
            )
    return np.stack(arrays)


def _channels_first(array: Array) -> Array:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[0] == 3:
        return array
    if array.shape[2] == 1:
        return array[:, :, 0]
    return array.transpose(2, 0, 1) if array.shape[2] == 3 else array


def _numbers(parts: Sequence[_Part], name: str) -> Array:
    columns = []
    for part in parts:
        where = f"{part.where}: column {name!r}"
        values = _values(part, name)
        with common.reading(where, "give numbers, or lists of equally many numbers"):
            array = np.asarray(values)
            if array.dtype.kind == "O" and None in values:
                raise InputError(f"{where}: row {values.index(None)} has no value: fill it in")
        if array.dtype.kind not in "biuf" or array.ndim > 2:
            raise InputError(
                f"{where}: holds {type(values[0]).__name__}, not numbers: choose other features"
            )
        columns.append(common.as_float32(array.reshape(len(array), -1), where))
    if len({column.shape[1] for column in columns}) != 1:
        raise InputError(f"column {name!r}: partitions differ in its width: make them alike")
    return np.concatenate(columns)
