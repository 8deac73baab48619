"""Named columns with one row per example, and the client of each row.

Readers (``fedzmg.data.formats``) make columns, the column store keeps them, partitions and presets
turn them into :class:`~fedzmg.data.federated.FederatedData`. Agreed names: ``x`` (images, as
stored), ``y`` (labels, int64), ``coarse`` (coarse labels), ``text`` (strings).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedzmg.errors import InputError

Array: TypeAlias = npt.NDArray[Any]


class Strings(NamedTuple):
    """UTF-8 strings end to end; row ``i`` is ``text[offsets[i] : offsets[i + 1]]``."""

    text: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]


Column: TypeAlias = Array | Strings


class Owners(NamedTuple):
    """Rows sorted by client: client ``i`` is called ``names[i]``, owns ``offsets[i : i + 2]``."""

    names: tuple[str, ...]
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """Columns of equally many rows; ``owners`` where the file names clients."""

    columns: Mapping[str, Column]
    owners: Owners | None = None
    notes: tuple[str, ...] = ()
    """Unexpected properties, for the user."""
    classes: tuple[str, ...] = ()
    """Names of labels in the order of their ids, where labels have names."""

    def __post_init__(self) -> None:
        """Refuse columns of different length and owners that do not match."""
        lengths = {name: rows_of(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            raise InputError(f"columns differ in length: {lengths}")
        if self.owners is not None:
            names, offsets = self.owners
            if len(set(names)) != len(names):
                twice = next(n for i, n in enumerate(names) if n in names[:i])
                raise InputError(f"client {twice!r} occurs twice: give each client one name")
            if len(offsets) != len(names) + 1 or offsets[0] != 0 or offsets[-1] != self.rows:
                raise InputError(
                    f"{len(names)} clients do not cover the {self.rows} rows from first to last"
                )

    @property
    def rows(self) -> int:
        """Number of examples."""
        return rows_of(next(iter(self.columns.values())))

    @property
    def clients(self) -> int | None:
        """Number of clients, where the file names any."""
        return None if self.owners is None else len(self.owners.names)

    def array(self, name: str) -> Array:
        """Return a column of numbers."""
        column = self.columns[name]
        assert not isinstance(column, Strings)
        return column

    def strings(self, name: str) -> Strings:
        """Return a column of strings."""
        column = self.columns[name]
        assert isinstance(column, Strings)
        return column

    def take(self, rows: npt.NDArray[np.int64], owners: Owners | None) -> Columns:
        """Copy some rows, in the order given."""
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if not isinstance(column, Strings):
                columns[name] = column[rows]
                continue
            lengths = np.diff(column.offsets)[rows]
            offsets = np.cumsum([0, *lengths], dtype=np.int64)
            starts = np.repeat(column.offsets[rows] - offsets[:-1], lengths)
            columns[name] = Strings(column.text[starts + np.arange(offsets[-1])], offsets)
        return replace(self, columns=columns, owners=owners)

    def __repr__(self) -> str:
        whose = "" if self.owners is None else f" of {len(self.owners.names):,} clients"
        kinds = ", ".join(f"{name} {kind_of(column)}" for name, column in self.columns.items())
        classes = f"; {len(self.classes)} named classes" if self.classes else ""
        return f"<Columns: {self.rows:,} rows{whose}; {kinds}{classes}>"


def rows_of(column: Column) -> int:
    """Count the rows of a column."""
    return len(column.offsets) - 1 if isinstance(column, Strings) else len(column)


def kind_of(column: Any) -> str:
    """Describe shape and type of a row of an array, a tensor or strings."""
    if isinstance(column, Strings):
        return "strings"
    shape = " x ".join(map(str, column.shape[1:]))
    return f"{shape} {str(column.dtype).removeprefix('torch.')}".strip()
