"""Hold out rows for testing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedzmg.data.columns import Array, Column, Columns, Owners, Strings
from fedzmg.errors import InputError
from fedzmg.seeds import stream


def hold_out(columns: Columns, share: float, *, seed: int = 0) -> tuple[Columns, Columns]:
    """Split each client's rows at random into training rows and a share of test rows.

    Every client keeps at least one row to train on. Rows without clients are split as one client's.

    Args:
        columns: all rows.
        share: share of each client's rows, between 0 and 1, rounded to whole rows.
        seed: seed of the random choice.
    """
    if not isinstance(columns, Columns):
        raise InputError(f"columns is a {type(columns).__name__}: pass the result of a reader")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise InputError(f"share = {share!r}: expected a number between 0 and 1, such as 0.2")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise InputError(f"seed = {seed!r}: expected a whole number")
    ends = np.array([0, columns.rows]) if columns.owners is None else columns.owners.offsets
    sizes = np.diff(ends)
    held = np.clip(np.rint(share * sizes).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    if not held.any():
        raise InputError(f"share = {share} of no client's rows is a whole row: use a larger one")
    owner = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.lexsort((stream(seed, "partition", "hold out").random(columns.rows), owner))
    first = np.arange(columns.rows) - ends[owner] < held[owner]
    test = np.zeros(columns.rows, dtype=bool)
    test[shuffled[first]] = True
    return _selected(columns, ~test), _selected(columns, test)


def _selected(columns: Columns, kept: npt.NDArray[np.bool_]) -> Columns:
    """Select rows, keeping their order."""
    owners = columns.owners
    if owners is not None:
        before = np.concatenate([[0], np.cumsum(kept)])
        owners = Owners(owners.names, before[owners.offsets].astype(np.int64))
    parts = {name: _some(column, kept) for name, column in columns.columns.items()}
    return Columns(parts, owners, columns.notes, columns.classes)


def _some(column: Column, kept: npt.NDArray[np.bool_]) -> Column:
    if not isinstance(column, Strings):
        chosen: Array = column[kept]
        return chosen
    lengths = np.diff(column.offsets)
    offsets = np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64)
    start, end = column.offsets[0], column.offsets[-1]
    return Strings(column.text[start:end][np.repeat(kept, lengths)], offsets)
