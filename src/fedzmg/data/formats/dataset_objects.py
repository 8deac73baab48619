"""Reader for dataset objects of Hugging Face, and for the partitions flwr-datasets makes of them.

Neither package is imported: an object counts as a dataset if it has ``column_names``, a length,
and gives a column for ``dataset[name]``. Rows are counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedzmg.data.columns import Array, Columns
from fedzmg.data.formats import common
from fedzmg.data.formats.common import Features, Grouping
from fedzmg.data.formats.image_folder import decode_all
from fedzmg.errors import InputError

_REMEDY = "look at that row of the dataset"


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
    parts = {"dataset": dataset}
    chosen = _check(parts, client, label, features)
    clients = None if client is None else _values(parts, client)
    grouping = common.by_client(clients, len(dataset), "dataset")
    return _columns(parts, grouping, label, chosen, classes, size, grey)


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

    ``partitions`` are datasets by name of client; those of a sequence are called 0, 1, 2, ...
    Other arguments are those of :func:`from_dataset`.
    """
    named = partitions if isinstance(partitions, Mapping) else dict(enumerate(partitions))
    parts = {f"client {str(name)!r}": dataset for name, dataset in named.items()}
    chosen = _check(parts, None, label, features)
    sizes = [len(dataset) for dataset in parts.values()]
    grouping = common.group(np.repeat(np.arange(len(parts)), sizes), [str(name) for name in named])
    return _columns(parts, grouping, label, chosen, classes, size, grey)


def _check(
    parts: Mapping[str, Any], client: str | None, label: str | None, features: Sequence[str] | None
) -> Sequence[str]:
    """Refuse what is not a table with rows; return the columns to learn from."""
    if not parts:
        raise InputError("no partition is given: give one dataset for each client")
    for where, dataset in parts.items():
        names = getattr(dataset, "column_names", None)
        # Streams have columns, too, but no length; several splits have a mapping.
        known = all(hasattr(type(dataset), method) for method in ("__getitem__", "__len__"))
        if not isinstance(names, list | tuple) or not known or len(dataset) == 0:
            raise InputError(
                f"{where}: a {type(dataset).__name__} is not a table with rows: choose one split, "
                "and load a stream first"
            )
        features = common.choose_features(names, client, label, features, where)
    return features or ()


def _values(parts: Mapping[str, Any], name: str) -> list[Any]:
    """Read a column of all parts."""
    values: list[Any] = []
    for where, dataset in parts.items():
        with common.reading(f"{where}: column {name!r}", _REMEDY):
            values += list(dataset[name][:])
    return values


def _feature(dataset: Any, name: str, attribute: str) -> Any:
    """Return an attribute of a column's declared type, where there is one."""
    features = getattr(dataset, "features", None)
    feature = features.get(name) if isinstance(features, Mapping) else None
    return getattr(feature, attribute, None)


def _columns(
    parts: Mapping[str, Any],
    grouping: Grouping,
    label: str | None,
    chosen: Sequence[str],
    classes: Sequence[str] | None,
    size: tuple[int, int] | None,
    grey: bool | None,
) -> Columns:
    [where, *_] = parts
    y: list[Any] | None = None
    if label is not None:
        y = []
        for here, dataset in parts.items():
            values: Any = _values({here: dataset}, label)
            own = _feature(dataset, label, "names")
            if own is not None:
                # By name: other partitions, or the user, may number classes in another order.
                ids, _ = common.labels(values, f"{here}: column {label!r}", own)
                values, classes = [own[i] for i in ids], classes or own
            y += values
    features: Features = None
    if len(chosen) == 1:
        name = chosen[0]
        first = next(_entries(parts, name))[1]
        if isinstance(first, str):
            features = _values(parts, name)
        elif _is_image(first):
            features = partial(decode_all, _entries(parts, name), size=size, grey=grey)
        elif np.ndim(first) > 1:
            features = _stack(parts, name)
    if features is None and chosen:
        features = common.side_by_side({name: _values(parts, name) for name in chosen}, where)
    return common.assemble(where, grouping, features, y, classes=classes)


def _entries(parts: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a column with its name in messages."""
    for part, dataset in parts.items():
        with common.reading(f"{part}: column {name!r}", _REMEDY):
            column = iter(dataset[name])
        for row in range(len(dataset)):
            where = f"{part}: column {name!r}, row {row}"
            with common.reading(where, _REMEDY):
                entry = next(column)
            yield where, entry


def _is_image(entry: Any) -> bool:
    """Tell whether an entry is an encoded image or an object of Pillow."""
    encoded = isinstance(entry, bytes) or (isinstance(entry, Mapping) and "bytes" in entry)
    return encoded or (hasattr(entry, "mode") and hasattr(entry, "convert"))


def _stack(parts: Mapping[str, Any], name: str) -> Array:
    """Stack arrays of one shape, colours first."""
    [(where, dataset), *_] = parts.items()
    try:  # the declared type, which lists of lists have lost
        declared = np.dtype(_feature(dataset, name, "dtype") or "O")
    except TypeError:
        declared = np.dtype("O")
    where = f"{where}: column {name!r}"
    with common.reading(where, "make all arrays alike"):
        dtype = declared if declared.kind in "biuf" else None
        array = np.stack([np.asarray(entry, dtype=dtype) for _, entry in _entries(parts, name)])
    common.check_numbers(array, where)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] == 3:
        return array
    if array.shape[3] == 1:
        return array[..., 0]
    return array.transpose(0, 3, 1, 2) if array.shape[3] == 3 else array
