"""Count the classes or characters of every client of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedzmg.data import embedded
from fedzmg.data.columns import Columns, Owners, Strings
from fedzmg.data.heterogeneity import Counts, Unit, label_counts, owners_of
from fedzmg.data.partition import make
from fedzmg.data.text import CHARACTERS, encode
from fedzmg.errors import InputError

UNKNOWN = "*"
"""Label of characters outside the vocabulary in tables and figures."""


class Population(NamedTuple):
    """Clients of one split."""

    names: tuple[str, ...]
    counts: Counts
    """``[clients, classes]``; a class of text is a character."""
    unit: Unit
    labels: tuple[str, ...]
    columns: Columns
    """Rows sorted by client."""
    partition: Mapping[str, Any] | None
    """Partition of the rows; None where the files name clients."""
    notes: tuple[str, ...]


DEFAULT_PARTITIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("digits", "train"): {"name": "dirichlet", "clients": 160, "alpha": 0.1},
    ("cifar100", "train"): {"name": "pachinko", "clients": 500},
    ("cifar100", "test"): {"name": "pachinko", "clients": 100},
}
"""Partitions of the presets for sets without clients."""


def embedded_columns(name: str, split: str) -> Columns:
    """Return a data set that ships with the package as columns."""
    if name == "digits" and split in ("train", "test"):
        digits = embedded.load_digits()
        x, y = (getattr(digits, f"{split}_{column}") for column in "xy")
        return Columns({"x": x, "y": y})
    if name == "plays" and split == "train":
        plays = embedded.load_plays()
        text = Strings(plays.text, plays.offsets)
        return Columns({"text": text}, Owners(plays.roles, np.arange(len(plays.roles) + 1)))
    raise InputError(f"{name!r} has no split {split!r}: use --split train")


def population(
    columns: Columns, *, classes: int | None, partition: Mapping[str, Any] | None
) -> Population:
    """Sort a split by client and count what each holds.

    Args:
        columns: images with labels, or text.
        classes: number of labels; by default the number of their names, or the largest label.
        partition: name, clients, seed and options, for files that name no clients.
    """
    record = None
    if partition is not None:
        columns, record = _partitioned(columns, dict(partition))
    if columns.owners is None:
        raise InputError(
            "it names no clients: use --partition dirichlet --clients 100 --set alpha=0.1"
        )
    unit: Unit = "characters" if "text" in columns.columns else "examples"
    labels: tuple[str, ...] = (*CHARACTERS, UNKNOWN)
    if unit == "characters":
        text = columns.strings("text")
        ids, offsets = encode(text.text, text.offsets[columns.owners.offsets])
    else:
        ids, offsets = columns.array("y"), columns.owners.offsets
        number = classes or int(ids.max(initial=0)) + 1
        labels = columns.classes or tuple(map(str, range(number)))
    counts = label_counts(ids, owners_of(offsets), classes=len(labels), clients=columns.clients)
    held = counts.sum(1) > 0
    empty = int((~held).sum())
    notes = (f"{empty} clients hold nothing and are left out",) if empty else ()
    names = tuple(name for name, some in zip(columns.owners.names, held, strict=True) if some)
    return Population(names, counts[held], unit, labels, columns, record, notes)


def _partitioned(columns: Columns, options: dict[str, Any]) -> tuple[Columns, dict[str, Any]]:
    """Sort the rows of an image set by client of a partition; return its record too."""
    if "y" not in columns.columns:
        raise InputError("text cannot be partitioned by label: its files name its clients")
    coarse = columns.array("coarse") if "coarse" in columns.columns else None
    made = make(options.pop("name"), columns.array("y"), coarse=coarse, **options)
    clients = int(made.owners.max()) + 1
    order = np.argsort(made.owners, kind="stable")
    offsets = np.searchsorted(made.owners[order], np.arange(clients + 1))
    owners = Owners(tuple(map(str, range(clients))), offsets - offsets[0])
    return columns.take(order[offsets[0] :], owners), made.as_dict()
